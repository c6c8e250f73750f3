//! Origin of an event: its time and its thread.

use std::borrow::Cow;

use jiff::Zoned;
use serde::Serialize;

use crate::print::clock;
use crate::print::text;
use crate::print::timeline::{Event, TimelineEntry};
use crate::process::container::CgroupInfo;

/// Time and thread of an event: the first members of its object in JSON.
#[derive(Debug, Serialize)]
pub struct Origin {
    /// The time at which the event ended.
    #[serde(serialize_with = "clock::serialize")]
    pub time: Zoned,
    /// The PID of the thread's process.
    pub pid: u32,
    /// The thread's TID.
    pub tid: u32,
    /// The thread's name, escaped.
    pub comm: String,
    /// The thread's cgroup of version 2 and its container, if they are requested.
    #[serde(flatten)]
    pub cgroup_info: Option<CgroupInfo>,
}

impl Origin {
    /// Creates the origin of an event that ended at `time` in the thread `tid`; `comm` is the thread's name as the
    /// kernel has it.
    pub fn new(
        time: Zoned,
        (pid, tid): (u32, u32),
        comm: &[i8],
        cgroup_info: Option<CgroupInfo>,
    ) -> Self {
        Self {
            time,
            pid,
            tid,
            comm: text::from_c(comm),
            cgroup_info,
        }
    }

    /// Returns the event for a timeline, with the name `name`; `took_ns` is None if its duration is not known.
    pub fn moment<'a>(
        &'a self,
        name: impl Into<Cow<'a, str>>,
        took_ns: Option<u64>,
    ) -> TimelineEntry<'a> {
        TimelineEntry::Event(Event {
            name: name.into(),
            pid: self.pid,
            tid: self.tid,
            comm: &self.comm,
            end: &self.time,
            took_ns,
        })
    }
}
