//! Events that the BPF programs send: mappings, exec and exit, calls of --trace.

use anyhow::Result;
use memtools::print::output::Output;
use memtools::print::text;
use memtools::stacks::named::Frame;

use super::allocators;
use super::bpf::types::{event, event_kind as Kind};
use super::ended::End;
use super::regions::Regions;
use super::signature::Signature;
use super::{Processes, allocations_of};
use crate::args::Mode;
use crate::rows::{Call, DoubleFree, Step};
use crate::source::Source;
use crate::sums::StackKey;

/// Maximum number of stacks of mappings that are remembered.
const MAX_PATHS: usize = 1 << 16;

impl Processes<'_> {
    /// Handles mappings and the ends of processes, and prints the lines of --trace.
    pub(super) fn take(
        &mut self,
        events: impl IntoIterator<Item = event>,
        output: &mut Output,
    ) -> Result<()> {
        for event in events {
            let step = self.take_event(&event, output)?;
            if self.plan.recording.trace
                && let Some(step) = step
            {
                let comm = text::from_c(&event.comm);
                output.row(&Call {
                    time: self.clock.local(event.time_ns),
                    process: self.names.at_event(event.pid, Some(comm), event.cgroup),
                    tid: event.tid,
                    step,
                    size_bytes: event.size,
                    address: event.address,
                })?;
            }
        }
        output.flush()
    }

    fn take_event(&mut self, event: &event, output: &mut Output) -> Result<Option<Step>> {
        let &event {
            pid,
            tid,
            address: start,
            size,
            time_ns,
            stack,
            ..
        } = event;
        let is_map = event.kind == Kind::EVENT_MAP;
        let by_free = is_map && self.is_mapped_by_free(StackKey { pid, stack })?;
        let page_bytes = self.page_bytes;
        let regions = self
            .regions
            .entry(pid)
            .or_insert_with(|| Regions::new(page_bytes));
        Ok(match event.kind {
            Kind::EVENT_MAP if by_free => {
                regions.map_ignored(start, size);
                Some(Step::AllocExited)
            }
            Kind::EVENT_MAP if self.plan.recording.mode == Mode::Alloc => {
                let total = self.mapped.entry(StackKey { pid, stack }).or_default();
                total.bytes += size;
                total.allocations += 1;
                Some(Step::AllocExited)
            }
            Kind::EVENT_MAP => {
                regions.map(start, size, time_ns, stack, event.level);
                Some(Step::AllocExited)
            }
            Kind::EVENT_MAP_IGNORED => {
                regions.map_ignored(start, size);
                None
            }
            // The allocator's own mappings are not recorded, so --trace does not show their unmaps.
            Kind::EVENT_UNMAP => regions.unmap(tid, start, size).then_some(Step::FreeEntered),
            Kind::EVENT_UNMAP_FAILED => {
                regions.unmap_failed(tid);
                None
            }
            Kind::EVENT_EXEC => {
                let comm = text::from_c(&event.comm);
                self.names.exec(pid, comm, event.cgroup);
                self.execs.insert(pid, size);
                self.end(pid, time_ns, End::Exec);
                None
            }
            Kind::EVENT_EXIT => {
                let comm = text::from_c(&event.comm);
                self.names.exit(pid, comm, event.cgroup);
                // The trace ends with the last process that was named, and the last report shows its memory.
                let last = self.named.remove(&pid) && self.named.is_empty();
                if !last {
                    self.end(pid, time_ns, End::Exit);
                }
                None
            }
            Kind::EVENT_FREED_TWICE => {
                self.freed_twice(event, output)?;
                None
            }
            // The event has already woken up the poller, and add_capacity() follows.
            Kind::EVENT_OVERFLOW_FULL | Kind::EVENT_CODE_REPLACED => None,
            Kind::EVENT_ALLOC_ENTER => Some(Step::AllocEntered),
            Kind::EVENT_ALLOC_EXIT => Some(Step::AllocExited),
            _ => Some(Step::FreeEntered),
        })
    }

    /// Whether memory was mapped within a function that frees. Such memory is the allocator's own: if a thread's first
    /// call is free(), glibc makes an arena for the thread. Memory that was mapped within a function that allocates is
    /// known to the BPF programs, by the function's return.
    fn is_mapped_by_free(&mut self, key: StackKey) -> Result<bool> {
        /// Maximum number of frames from mmap() to free().
        const INNERMOST: usize = 8;
        if let Some(&known) = self.mapped_by_free.get(&key) {
            return Ok(known);
        }
        self.symbolizer.refresh();
        let stack = self.symbolize(key)?;
        let frees = |frame: &Frame| {
            let shown = frame.symbol.as_ref().map(|(name, _)| &**name);
            let name = frame.mangled.as_deref().or(shown);
            let signature =
                name.and_then(|name| allocators::signature(name, &self.plan.functions.prefix));
            signature.is_some_and(Signature::frees)
        };
        let frames = stack.user.iter().flat_map(|part| &part.frames);
        let found = frames.take(INNERMOST).any(frees);
        if self.mapped_by_free.len() == MAX_PATHS {
            self.mapped_by_free.clear();
        }
        self.mapped_by_free.insert(key, found);
        Ok(found)
    }

    /// Handles the end of a process's address space.
    fn end(&mut self, pid: u32, time_ns: u64, end: End) {
        if let Some(regions) = self.regions.remove(&pid)
            && end == End::Exit
        {
            let mut left = allocations_of(pid, &regions);
            left.retain(|region| {
                region
                    .time_ns
                    .saturating_add(self.plan.report.older_at_end_ns())
                    <= time_ns
            });
            self.exited_totals.add(&left, self.plan.recording.sampling);
        }
        self.address_space_ends
            .entry(pid)
            .or_default()
            .add(time_ns, end);
    }

    /// Prints each stack that has freed a block twice, once. The report has the count.
    fn freed_twice(&mut self, event: &event, output: &mut Output) -> Result<()> {
        let key = StackKey {
            pid: event.pid,
            stack: event.stack,
        };
        if !self.reported_double_frees.insert(key) {
            return Ok(());
        }
        self.symbolizer.refresh();
        let stack = self.symbolize(key)?;
        let freed = DoubleFree {
            time: self.clock.local(event.time_ns),
            process: Some(self.names.at_event(event.pid, None, event.cgroup)),
            address: event.address,
            stack,
        };
        if self.plan.report.is_json() {
            output.row(&freed)
        } else {
            memtools::message!("{}", freed.to_string().trim_end());
            Ok(())
        }
    }
}
