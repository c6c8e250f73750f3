//! Totals by stack, as the BPF programs have added them up.

use anyhow::{Context, Result};
use libbpf_rs::MapCore;
use memtools::bpf::map_batch;
use memtools::bpf::types;
use memtools::process::proc;

use super::Processes;
use super::bpf::types::{peak, total, total_key};
use super::ended::AddressSpaceEnds;
use super::probes::Attached;
use crate::sums::{StackKey, Sum, Totals};

/// Maximum number of reads of the totals. A read is of the peak unless a higher peak comes meanwhile.
const PEAK_TRIES: usize = 8;

impl Processes<'_> {
    /// Returns the BPF programs' totals, and those of mappings in --mode alloc.
    pub(super) fn read_totals(&self) -> Result<Totals> {
        let mut totals = self.mapped.clone();
        map_batch::for_each(&self.attached.skel.maps.totals, |key, value| {
            let (key, value): (&total_key, &total) = (types::view(key)?, types::view(value)?);
            let &total_key { pid, stack, execs } = key;
            // A process does not have any more what it had before it called exec.
            let current = self
                .execs
                .get(&pid)
                .is_none_or(|&now| u64::from(execs) >= now);
            if self.plan.recording.only_totals && !current {
                return Ok(());
            }
            let key = StackKey { pid, stack };
            let total = totals.entry(key).or_default();
            total.bytes += value.bytes;
            total.allocations += value.count;
            Ok(())
        })?;
        Ok(totals)
    }

    /// Removes the totals of processes that have exited from the BPF programs' totals, and returns them. A process that
    /// runs by now under the PID of one that has exited keeps that one's totals until it exits.
    pub(super) fn take_totals_of_exited(&self) -> Result<Totals> {
        let map = &self.attached.skel.maps.totals;
        let ended = |pid: &u32| {
            let ends = self.address_space_ends.get(pid);
            ends.is_some_and(AddressSpaceEnds::has_exited) && !proc::has_living_thread(*pid)
        };
        let mut left = Vec::new();
        map_batch::for_each(map, |key, value| {
            let (key, value): (&total_key, &total) = (types::view(key)?, types::view(value)?);
            if ended(&key.pid) {
                left.push((*key, *value));
            }
            Ok(())
        })?;
        let mut totals = Totals::new();
        for (key, value) in left {
            map.delete(types::bytes_of(&key))
                .context("failed to drop the totals of an exited process")?;
            let &total_key { pid, stack, execs } = &key;
            let is_last = self
                .execs
                .get(&pid)
                .is_none_or(|&now| u64::from(execs) >= now);
            if is_last && value.count > 0 {
                let total = totals.entry(StackKey { pid, stack }).or_default();
                total.bytes += value.bytes;
                total.allocations += value.count;
            }
        }
        Ok(totals)
    }
}

/// Returns the totals of each stack at the peak.
pub(super) fn at_peak(attached: &Attached) -> Result<Totals> {
    let bss = attached.skel.maps.bss_data.as_deref();
    let bss = bss.context("the BPF object has no variables")?;
    let peak = || types::read_while_written(&bss.peak);
    let mut tries = PEAK_TRIES;
    let (peak, totals) = loop {
        let before = peak();
        let totals = totals_at(attached, &before)?;
        tries -= 1;
        if peak().number == before.number || tries == 0 {
            break (before, totals);
        }
    };
    let sum = Sum::of(&totals).total;
    if sum.bytes != peak.bytes {
        memtools::message!(
            "{} bytes were outstanding, but the stacks have {}: threads allocated at the same time, or usage rose during the \
             measurement",
            peak.bytes,
            sum.bytes
        );
    }
    Ok(totals)
}

fn totals_at(attached: &Attached, peak: &peak) -> Result<Totals> {
    let mut totals = Totals::new();
    map_batch::for_each(&attached.skel.maps.totals, |key, value| {
        let (key, value): (&total_key, &total) = (types::view(key)?, types::view(value)?);
        let (bytes, allocations) = if value.peak == peak.number {
            (value.bytes_at_peak, value.count_at_peak)
        } else {
            (value.bytes, value.count)
        };
        // Other entries are of other programs that the process has executed, before or after the peak.
        if u64::from(key.execs) == peak.execs {
            let key = StackKey {
                pid: key.pid,
                stack: key.stack,
            };
            let total = totals.entry(key).or_default();
            total.bytes += bytes;
            total.allocations += allocations;
        }
        Ok(())
    })?;
    Ok(totals)
}
