//! Where an event comes from: when it was, and which thread it is of.

use std::borrow::Cow;
use std::ffi::c_char;

use jiff::Zoned;
use serde::Serialize;

use crate::print::clock;
use crate::print::text;
use crate::print::timeline::{Event, Moment};
use crate::process::container::Home;

/// When an event was, and which thread it is of: the first members of its object in JSON.
#[derive(Debug, Serialize)]
pub struct Origin {
    /// When it ended.
    #[serde(serialize_with = "clock::serialize")]
    pub time: Zoned,
    /// The thread's process.
    pub pid: u32,
    /// The thread.
    pub tid: u32,
    /// The thread's name, escaped.
    pub comm: String,
    /// The thread's cgroup of version 2, and its container, where they are asked for.
    #[serde(flatten)]
    pub home: Option<Home>,
}

impl Origin {
    /// The origin of what ended at `time` in the thread `tid`, whose name is `comm` as the kernel has it.
    pub fn new(time: Zoned, (pid, tid): (u32, u32), comm: &[c_char], home: Option<Home>) -> Self {
        Self {
            time,
            pid,
            tid,
            comm: text::from_c(comm),
            home,
        }
    }

    /// The event as a timeline shows it, called `name`; `took_ns` is None where it is not known how long it took.
    pub fn moment<'a>(&'a self, name: impl Into<Cow<'a, str>>, took_ns: Option<u64>) -> Moment<'a> {
        Moment::Event(Event {
            name: name.into(),
            pid: self.pid,
            tid: self.tid,
            comm: &self.comm,
            end: &self.time,
            took_ns,
        })
    }
}
