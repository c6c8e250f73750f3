//! How often the kernel has skipped BPF programs, as it counts it.

use std::fs;
use std::os::fd::{AsFd, AsRawFd};

/// How often the kernel has skipped these programs, as they were already running on that CPU. Kernels
/// that do not count it (before 5.12) skip none of those on raw tracepoints.
pub(crate) fn skipped<P: AsFd>(programs: impl IntoIterator<Item = P>) -> u64 {
    let skipped = |program| fdinfo_of(program).number("recursion_misses");
    programs.into_iter().filter_map(skipped).sum()
}

/// How often, at most, it has skipped all of these programs, of one hook, which do the same.
pub(crate) fn skipped_by_all<P: AsFd>(programs: impl IntoIterator<Item = P>) -> u64 {
    let skipped = programs.into_iter().map(|program| skipped([program]));
    skipped.min().unwrap_or_default()
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
}
