//! `--max-overhead`: sampling is raised until recording takes no more of the target's CPU time.

use anyhow::{Context, Result};

use super::bpf::types::steering;
use super::cost::Share;
use super::probes::Attached;
use crate::args::Args;
use crate::sampling::Sampling;

/// Where fewer hits than this are recorded, leaving out more saves nothing: recording a call costs
/// about as much as three hits.
const FEW: f64 = 0.01;

/// The limit, and how far sampling has been raised to keep it. It is not lowered again: what was
/// too much once will be again, and each change widens the intervals of what is known.
pub(crate) struct Limit<'a> {
    attached: &'a Attached,
    sampling: Sampling,
    /// The programs' part of the target's CPU time at most, in percent.
    percent: f64,
    level: u32,
    told_of_rest: bool,
}

impl<'a> Limit<'a> {
    /// The one that the options set, if they do.
    pub(crate) fn of(args: &Args, attached: &'a Attached) -> Option<Self> {
        Some(Self {
            attached,
            sampling: Sampling::of(args)?,
            percent: args.max_overhead?,
            level: 0,
            told_of_rest: false,
        })
    }

    /// Raises sampling if the target's share is too much, and says so. Returns whether it did.
    pub(crate) fn hold(&mut self, share: Share) -> Result<bool> {
        let Share { percent, .. } = share;
        if percent <= self.percent {
            return Ok(false);
        }
        let up = levels_up(share, self.percent);
        let level = (self.level + up).min(self.sampling.highest_level());
        if level == self.level {
            if !self.told_of_rest {
                self.told_of_rest = true;
                eprintln!(
                    "memleak: {percent:.1} % of the target's CPU time, over the limit: what is left \
                     is the cost of the probes, which no sampling lowers"
                );
            }
            return Ok(false);
        }
        self.attached
            .steer(steering::STEERING_LEVEL, level)
            .context("failed to raise sampling")?;
        self.level = level;
        eprintln!(
            "memleak: {percent:.1} % of the target's CPU time, over the limit: from now on blocks \
             are recorded as with --sample-bytes {}",
            self.sampling.distance(level)
        );
        Ok(true)
    }

    /// Says so if the whole trace took more than the limit: until sampling was raised, or as it
    /// cannot be raised any further.
    pub(crate) fn tell(&self, percent: Option<f64>) {
        match percent {
            Some(percent) if percent > self.percent => eprintln!(
                "memleak: --max-overhead {} % was not kept over the whole trace: {percent:.1} % of \
                 the target's CPU time",
                self.percent
            ),
            Some(_) => {}
            None => eprintln!(
                "memleak: whether --max-overhead {} % was kept is not known: the target ended, or \
                 used too little CPU time",
                self.percent
            ),
        }
    }
}

/// How many levels to go up where the share is over the limit. With each, half as many calls are
/// recorded, but for large blocks. No more than leave a few.
fn levels_up(share: Share, limit_percent: f64) -> u32 {
    let wanted = (share.percent / limit_percent).log2().ceil();
    let useful = (share.recorded / FEW).log2().ceil();
    // Of infinity, and of what is below 0, it makes the nearest number that there is.
    wanted.min(useful) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_level_halves() {
        let up = |percent| {
            let recorded = 0.33;
            levels_up(Share { percent, recorded }, 5.0)
        };
        assert_eq!([5.1, 10.0, 10.1, 39.0].map(up), [1, 1, 2, 3]);
    }

    #[test]
    fn a_few_are_still_recorded() {
        let up = |recorded| {
            let percent = 100.0;
            levels_up(Share { percent, recorded }, 0.001)
        };
        assert_eq!([0.33, 0.04, 0.011, 0.009, 0.0].map(up), [6, 2, 1, 0, 0]);
    }
}
