//! Tests on one CPU.

use anyhow::Result;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// Guard that keeps this thread, and what the thread starts, on one CPU until it is dropped.
pub(crate) struct OneCpu(CpuSet);

impl OneCpu {
    pub(crate) fn enter() -> Result<Self> {
        let this = Pid::from_raw(0);
        let before = sched_getaffinity(this)?;
        let mut one = CpuSet::new();
        one.set(0)?;
        sched_setaffinity(this, &one)?;
        Ok(Self(before))
    }
}

impl Drop for OneCpu {
    fn drop(&mut self) {
        let _ = sched_setaffinity(Pid::from_raw(0), &self.0);
    }
}
