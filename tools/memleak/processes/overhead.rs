//! `--max-overhead`: the sampling level is raised until recording takes no more than a limit of the target's CPU time.

use anyhow::{Context, Result};

use super::bpf::types::steering;
use super::cost::Share;
use super::probes::Attached;
use crate::plan::Recording;
use crate::sampling::Sampling;

/// Part of the hits that are recorded, below which it saves nothing to record fewer: recording a call costs about as
/// much as three hits.
const MIN_RECORDED_SHARE: f64 = 0.01;

/// Limit, and the sampling level that was chosen to keep it. The level is not lowered again: a load that was too much
/// once will be so again, and each change widens the confidence intervals.
pub(crate) struct Limit<'a> {
    attached: &'a Attached,
    sampling: Sampling,
    /// Maximum part of the target's CPU time for the BPF programs, in percent.
    percent: f64,
    level: u32,
    told_of_rest: bool,
}

impl<'a> Limit<'a> {
    /// Returns the limit of the settings, if any.
    pub(crate) fn of(recording: &Recording, attached: &'a Attached) -> Option<Self> {
        Some(Self {
            attached,
            sampling: recording.sampling?,
            percent: recording.max_overhead?,
            level: 0,
            told_of_rest: false,
        })
    }

    /// Raises the sampling level if the share is over the limit, and prints that. Returns whether the level was raised.
    pub(crate) fn enforce(&mut self, share: Share) -> Result<bool> {
        let Share { percent, .. } = share;
        if percent <= self.percent {
            return Ok(false);
        }
        let up = levels_up(share, self.percent);
        let level = (self.level + up).min(self.sampling.highest_level());
        if level == self.level {
            if !self.told_of_rest {
                self.told_of_rest = true;
                memtools::message!(
                    "{percent:.1} % of the target's CPU time, over the limit: what is left \
                     is the cost of the probes, which no sampling lowers"
                );
            }
            return Ok(false);
        }
        self.attached
            .steer(steering::STEERING_LEVEL, level.into())
            .context("failed to raise sampling")?;
        self.level = level;
        memtools::message!(
            "{percent:.1} % of the target's CPU time, over the limit: blocks are now recorded as \
             with --sample-bytes {}",
            self.sampling.distance(level)
        );
        Ok(true)
    }

    /// Prints a message if the whole trace was over the limit: before the level was raised, or because it could not be
    /// raised any further. Prints one, too, if the share is not known.
    pub(crate) fn tell(&self, percent: Option<f64>) {
        match percent {
            Some(percent) if percent > self.percent => memtools::message!(
                "--max-overhead {} % was not kept over the whole trace: {percent:.1} % of \
                 the target's CPU time",
                self.percent
            ),
            Some(_) => {}
            None => memtools::message!(
                "whether --max-overhead {} % was kept is not known: the target ended, or \
                 used too little CPU time",
                self.percent
            ),
        }
    }
}

/// Returns by how many levels to raise sampling where the share is over the limit. Each level halves the calls that are
/// recorded, except those of large blocks. At least a few calls remain recorded.
fn levels_up(share: Share, limit_percent: f64) -> u32 {
    let wanted = (share.percent / limit_percent).log2().ceil();
    let useful = (share.recorded / MIN_RECORDED_SHARE).log2().ceil();
    // The cast to u32 saturates, for infinity and for numbers below 0.
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
