//! How often BPF programs ran and how long that took, as the kernel counts it.

use std::fs;
use std::ops::{AddAssign, Sub};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use anyhow::{Context, Result};
use libbpf_rs::libbpf_sys::{BPF_STATS_RUN_TIME, bpf_enable_stats};

/// While it is there, the kernel counts the runs of all BPF programs of the system. That costs each
/// run two looks at the clock.
#[derive(Debug)]
pub struct Counting {
    _descriptor: OwnedFd,
}

impl Counting {
    /// Has the kernel count.
    ///
    /// # Errors
    /// Without CAP_SYS_ADMIN.
    pub fn start() -> Result<Self> {
        // SAFETY: a system call that takes a number, and returns a new descriptor or an error.
        let descriptor = unsafe { bpf_enable_stats(BPF_STATS_RUN_TIME) };
        if descriptor < 0 {
            let error = std::io::Error::from_raw_os_error(-descriptor);
            return Err(error)
                .context("failed to have the kernel measure BPF programs; it wants CAP_SYS_ADMIN");
        }
        // SAFETY: a new descriptor that is nobody else's.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
        Ok(Self {
            _descriptor: descriptor,
        })
    }
}

/// Runs that were counted.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Runs {
    /// How many.
    pub count: u64,
    /// Nanoseconds that they took together: of the program alone, not of what it hangs on.
    pub time_ns: u64,
}

impl Runs {
    /// All runs of these programs, as far as they were counted.
    pub fn of<P: AsFd>(programs: impl IntoIterator<Item = P>) -> Self {
        let mut all = Self::default();
        for program in programs {
            let info = fdinfo_of(program);
            all += Self {
                count: info.number("run_cnt").unwrap_or(0),
                time_ns: info.number("run_time_ns").unwrap_or(0),
            };
        }
        all
    }

    /// Nanoseconds that one takes on average; none if there was none.
    pub fn mean_ns(self) -> Option<f64> {
        (self.count > 0).then(|| self.time_ns as f64 / self.count as f64)
    }
}

impl AddAssign for Runs {
    fn add_assign(&mut self, other: Self) {
        self.count += other.count;
        self.time_ns += other.time_ns;
    }
}

impl Sub for Runs {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            count: self.count - earlier.count,
            time_ns: self.time_ns - earlier.time_ns,
        }
    }
}

/// How often the kernel has skipped these programs, as they were already running on that CPU. Kernels
/// that do not count it (before 5.12) skip none of those on raw tracepoints.
pub(crate) fn skipped<P: AsFd>(programs: impl IntoIterator<Item = P>) -> u64 {
    let skipped = |program| fdinfo_of(program).number("recursion_misses");
    programs.into_iter().filter_map(skipped).sum()
}

/// What the kernel says of a program.
struct FdInfo(String);

fn fdinfo_of(program: impl AsFd) -> FdInfo {
    let descriptor = program.as_fd().as_raw_fd();
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{descriptor}"));
    FdInfo(info.unwrap_or_default())
}

impl FdInfo {
    /// The value of a field, if this kernel has it.
    fn number(&self, field: &str) -> Option<u64> {
        let mut fields = self.0.lines().filter_map(|line| line.split_once(':'));
        let (_, value) = fields.find(|(name, _)| *name == field)?;
        value.trim().parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_by_their_whole_name() {
        let info = "pos:\t0\nprog_type:\t17\nrun_cnt:\t7\nrecursion_misses:\t23\n";
        let info = FdInfo(info.into());
        assert_eq!(info.number("recursion_misses"), Some(23));
        assert_eq!(info.number("cnt"), None);
        assert_eq!(FdInfo("pos:\t0\n".into()).number("run_cnt"), None);
    }

    #[test]
    fn nothing_has_no_mean() {
        let runs = Runs {
            count: 4,
            time_ns: 10,
        };
        assert_eq!(runs.mean_ns(), Some(2.5));
        assert_eq!((runs - runs).mean_ns(), None);
    }
}
