//! Evidence that the rules judge.

use std::cmp::Reverse;
use std::collections::HashMap;

use memtools::host::kernel_log::OomScope;

use crate::doctor::is_tool;
use crate::findings::{Next, memleak_of, shell_word};
use crate::processes::ProcessUsage;
use crate::screen::size;
use crate::snapshot::{self, OneShotData, Snapshot};
use crate::who::Culprit;

/// Evidence for the rules: two looks, and data that need no second one.
pub(crate) struct Evidence<'a> {
    pub(crate) before: &'a Snapshot,
    pub(crate) now: &'a Snapshot,
    pub(crate) one_shot: &'a OneShotData,
    /// Bytes by which processes have grown between the two looks.
    pub(crate) growth: &'a HashMap<u32, i64>,
}

impl Evidence<'_> {
    pub(super) fn seconds(&self) -> f64 {
        let between = self.now.at.saturating_duration_since(self.before.at);
        between.as_secs_f64().max(f64::EPSILON)
    }

    /// Returns the rate per second of a counter of /proc/vmstat between the two looks.
    pub(super) fn rate(&self, name: &str) -> f64 {
        let (now, before) = (
            self.now.counters.get_or_zero(name),
            self.before.counters.get_or_zero(name),
        );
        now.saturating_sub(before) as f64 / self.seconds()
    }

    /// Returns the pages per second that were read back from swap.
    pub(super) fn swap_ins(&self) -> f64 {
        snapshot::SWAP_INS
            .into_iter()
            .map(|name| self.rate(name))
            .sum()
    }

    /// Returns the pages per second that were written to swap.
    pub(super) fn swap_outs(&self) -> f64 {
        self.rate("pswpout") + self.rate("zswpout")
    }

    /// Returns the sum of [`Evidence::rate`] over all counters whose names have this prefix.
    pub(super) fn rate_of_prefix(&self, prefix: &str) -> f64 {
        let sum = |look: &Snapshot| look.counters.sum_of(prefix);
        sum(self.now).saturating_sub(sum(self.before)) as f64 / self.seconds()
    }

    /// Returns the share of these bytes in the machine's memory, in percent.
    pub(super) fn share(&self, bytes: u64) -> f64 {
        bytes as f64 * 100.0 / self.now.accounting.total.max(1) as f64
    }

    /// Returns the process with the most memory that only it can give back.
    pub(super) fn largest(&self) -> Option<&ProcessUsage> {
        self.largest_by(ProcessUsage::anon_and_swap)
    }

    /// Returns the process, other than the tools themselves, whose number of bytes is largest. None if all are 0.
    pub(super) fn largest_by(&self, bytes: impl Fn(&ProcessUsage) -> u64) -> Option<&ProcessUsage> {
        let processes = self.now.processes.iter();
        processes
            .filter(|usage| bytes(usage) > 0 && !is_tool(&usage.comm))
            .max_by_key(|usage| (bytes(usage), Reverse(usage.pid)))
    }

    /// Returns the process that has grown most, other than the tools themselves, with its growth in bytes. None if no
    /// process has grown.
    pub(super) fn fastest(&self) -> Option<(&ProcessUsage, i64)> {
        let processes = self.now.processes.iter();
        let grown = processes.filter_map(|usage| Some((usage, *self.growth.get(&usage.pid)?)));
        grown
            .filter(|(usage, bytes)| *bytes > 0 && !is_tool(&usage.comm))
            .max_by_key(|(usage, bytes)| (*bytes, Reverse(usage.pid)))
    }

    /// Returns the process, other than the tools themselves, whose number has grown most between the two looks, and the
    /// growth per second.
    pub(super) fn fastest_by(
        &self,
        number: impl Fn(&ProcessUsage) -> u64,
    ) -> Option<(&ProcessUsage, f64)> {
        let before: HashMap<_, _> = self
            .before
            .processes
            .iter()
            .map(|usage| ((usage.pid, usage.started), number(usage)))
            .collect();
        let processes = self.now.processes.iter();
        let grown = processes.filter_map(|usage| {
            let before = before.get(&(usage.pid, usage.started))?;
            Some((usage, number(usage).saturating_sub(*before)))
        });
        grown
            .filter(|(usage, grown)| *grown > 0 && !is_tool(&usage.comm))
            .max_by_key(|(usage, grown)| (*grown, Reverse(usage.pid)))
            .map(|(usage, grown)| (usage, grown as f64 / self.seconds()))
    }

    /// Returns the process that copies most pages that it shares since a fork(2), by its minor faults. None unless
    /// anonymous memory has grown by `grown` bytes, but processes by less than half of that: a shared page counts for
    /// each process that shares it, until the process writes to the page.
    pub(super) fn copier(&self, grown: u64) -> Option<&ProcessUsage> {
        let own: i64 = self.growth.values().filter(|bytes| **bytes > 0).sum();
        let (usage, faults) = self.fastest_by(|usage| usage.minor_faults)?;
        let page_bytes = 4096.0;
        let copied = faults * self.seconds() * page_bytes;
        (own.unsigned_abs() < grown / 2 && copied >= grown as f64 / 2.0).then_some(usage)
    }

    /// Returns a description of what has taken most of these bytes between the two looks, and the command that shows
    /// more. It is a process, or else the part of memory that has grown most.
    pub(super) fn main_consumer(&self, taken: u64) -> (String, Next) {
        let per_second = |bytes: u64| size((bytes as f64 / self.seconds()) as u64);
        if let Some((usage, bytes)) = self.fastest()
            && bytes.unsigned_abs() >= taken / 2
        {
            let rate = per_second(bytes.unsigned_abs());
            let text = format!("{} (pid {}) grows by {rate}/s", usage.comm, usage.pid);
            return (text, memleak_of(usage));
        }
        let (before, now) = (&self.before.accounting, &self.now.accounting);
        let grown = now.parts.iter().map(|part| {
            let before = before.part(part.name).unwrap_or_default();
            (part.name, part.bytes.saturating_sub(before))
        });
        let unaccounted = now.unaccounted().saturating_sub(before.unaccounted());
        let unaccounted = (
            "unaccounted",
            u64::try_from(unaccounted).unwrap_or_default(),
        );
        let grown = grown.filter(|(name, _)| !name.starts_with("free"));
        let most = grown.chain([unaccounted]).max_by_key(|(_, bytes)| *bytes);
        let (part, bytes) = most.unwrap_or(unaccounted);
        if part == "anonymous"
            && let Some(copier) = self.copier(bytes)
        {
            let pid = copier.pid;
            let text = format!(
                "anonymous grows by {}/s, but no process: {} (pid {pid}) writes to pages that it shares since a fork",
                per_second(bytes),
                copier.comm
            );
            let next = Next::from(format!("faults --bytes -p {pid} -d 10"));
            return (text, next.with_culprit(Culprit::Process(pid)));
        }
        let next = match part {
            "anonymous" => Next::from("faults --by-process -d 10").with_culprit(Culprit::Processes),
            "slab" => Next::from("memleak -k --by-cache 10").with_culprit(Culprit::KernelSlabs),
            _ => Next::from("memleak -k 10").with_culprit(Culprit::KernelPages),
        };
        (format!("{part} grows by {}/s", per_second(bytes)), next)
    }

    /// Returns the command that shows most after an OOM kill: where the memory of the cgroup is that was at its limit,
    /// or, if there is none any more, memagent, which
    /// reports the next kill with what led to it.
    pub(super) fn after_kill(&self, scope: &OomScope) -> Next {
        let mut limited = self.now.groups.limited.iter();
        let cgroup = match scope {
            OomScope::Cgroup(Some(path)) => limited.find(|cgroup| cgroup.path == *path),
            OomScope::Cgroup(None) | OomScope::Machine => None,
        };
        match cgroup {
            Some(cgroup) => {
                let folder = shell_word(&cgroup.folder.to_string_lossy());
                Next::from(format!("memtriage --cgroup {folder}"))
            }
            None => "memagent".into(),
        }
    }

    /// Returns the command for the process that grows fastest, or else is largest.
    pub(super) fn memleak_of_suspect(&self) -> Next {
        let suspect = self.fastest().map(|(usage, _)| usage).or(self.largest());
        suspect.map_or_else(
            || Next::from("faults -d 10 --by-process").with_culprit(Culprit::Processes),
            memleak_of,
        )
    }
}
