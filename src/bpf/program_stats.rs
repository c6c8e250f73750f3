//! How often the kernel has skipped BPF programs, from the kernel's own counters.

use std::fs;
use std::os::fd::{AsFd, AsRawFd};

use anyhow::{Context, Result};

/// Returns how often the kernel has skipped these programs, as they were already running on that CPU. Kernels before
/// 5.12 do not count this, but skip no programs on raw tracepoints.
///
/// # Errors
/// If the kernel's counters cannot be read.
pub(crate) fn skipped<P: AsFd>(programs: impl IntoIterator<Item = P>) -> Result<u64> {
    let skipped = |program| Ok(fdinfo_of(program)?.number("recursion_misses").unwrap_or(0));
    programs.into_iter().map(skipped).sum()
}

/// Returns how often, at most, the kernel has skipped all of these programs for one event. They must be on one hook
/// and do the same.
///
/// # Errors
/// If the kernel's counters cannot be read.
pub(crate) fn skipped_by_all<P: AsFd>(programs: impl IntoIterator<Item = P>) -> Result<u64> {
    let skipped = programs.into_iter().map(|program| skipped([program]));
    let skipped: Vec<u64> = skipped.collect::<Result<_>>()?;
    Ok(skipped.into_iter().min().unwrap_or_default())
}

/// Text of a program's file in `/proc/self/fdinfo`.
struct FdInfo(String);

fn fdinfo_of(program: impl AsFd) -> Result<FdInfo> {
    let path = format!("/proc/self/fdinfo/{}", program.as_fd().as_raw_fd());
    let info = fs::read_to_string(&path);
    let info = info.with_context(|| format!("failed to read the counters of a program: {path}"))?;
    Ok(FdInfo(info))
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
}
