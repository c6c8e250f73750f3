//! Collection of counts, stacks and mappings from the kernel, on a thread of its own: the kernel's tables are emptied,
//! and replaced by larger ones, also while a report is symbolized, or waits for a slow reader of stdout.

use std::collections::HashMap;
use std::io::{PipeReader, PipeWriter, pipe};
use std::mem;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope};
use std::time::Instant;

use anyhow::{Context, Result};
use libbpf_rs::MapHandle;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::StackCountMaps;
use super::options::{MAX_IN_KERNEL, MAX_STACKS};
use crate::bpf::fill_level::{self, FillLevel, Table, TableUsage};
use crate::bpf::map_counts::Counts;
use crate::bpf::ring::Events;
use crate::bpf::{map_create, types};
use crate::print::text;
use crate::process::mapping_log::{Change, MappingLog};
use crate::run::stack_sums::{self, Count, Key};
use crate::stacks::table::{Stack, StackMaps, Stacks};

/// Maximum number of changes of mappings that wait in user space: 50 MB. While so many wait, the kernel's log takes
/// the next ones, and counts those that it loses.
const MAX_CHANGES: usize = 1 << 18;
/// Time in milliseconds after which the log is looked at again if too many changes waited.
const LOOK_AGAIN: u16 = 100;

/// What was collected and not yet taken.
#[derive(Debug, Default)]
pub(super) struct Collected {
    /// Counts by process and stack.
    pub(super) counts: HashMap<Key, Count>,
    /// The stacks of these counts, by id, without those that the kernel could not store.
    pub(super) stacks: HashMap<u64, Arc<Stack>>,
    /// Events whose stacks were omitted, as too many waited.
    pub(super) without_stack: u64,
    /// Changes of mappings, in order of time.
    pub(super) changes: Vec<Change>,
    /// The number of changes that are older than the last collection; None if nothing was collected since the last call
    /// of [`Collector::take`]. All counts of a process that exited in one of them, or before, have been collected.
    pub(super) settled: Option<usize>,
    /// Number of changes that the kernel's log has lost since the start.
    pub(super) lost_changes: u64,
}

/// Handles of the kernel's maps, which a thread can borrow.
pub(super) struct KernelMaps {
    counts: [MapHandle; 3],
    stacks: [MapHandle; 3],
    requests: MapHandle,
}

impl KernelMaps {
    /// Opens the skeleton's maps once more.
    ///
    /// # Errors
    /// If there are no descriptors left.
    pub(super) fn open<M>(maps: &StackCountMaps<'_, M>) -> Result<Self>
    where
        for<'a> MapHandle: TryFrom<&'a M, Error = libbpf_rs::Error>,
    {
        let [counts, a, b] = maps.counts;
        let StackMaps {
            first,
            holder,
            fill_levels,
        } = maps.stacks;
        let open = map_create::reopen::<M>;
        Ok(Self {
            counts: [open(counts)?, open(a)?, open(b)?],
            stacks: [open(first)?, open(holder)?, open(fill_levels)?],
            requests: open(maps.requests)?,
        })
    }
}

/// The kernel's tables and its log of mappings, which two threads collect from.
pub(super) struct Collector<'map> {
    tables: Mutex<Tables<'map>>,
    requests: &'map MapHandle,
    /// Readable after the thread has collected something, or has failed.
    news: EventFd,
}

struct Tables<'map> {
    counts: Counts<'map, MapHandle, types::stack_count_key, types::stack_count>,
    fill_level: FillLevel,
    stacks: Stacks<'map, MapHandle>,
    log: MappingLog,
    /// Maximum number of entries of a map in the kernel.
    max_entries: u32,
    /// When the counts were collected last.
    collected_at: Instant,
    collected: Collected,
    /// Why the thread has ended.
    error: Option<anyhow::Error>,
}

/// The thread, which ends when this is dropped.
pub(super) struct Running {
    _stop: PipeWriter,
}

impl<'map> Collector<'map> {
    /// Creates a collector of these maps. The kernel's maps may grow to `max_stacks` entries.
    ///
    /// # Errors
    /// If the maps that say how full the tables are cannot be mapped, or there are no descriptors left.
    pub(super) fn new(maps: &'map KernelMaps, log: MappingLog, max_stacks: u32) -> Result<Self> {
        let [counts, a, b] = &maps.counts;
        let [first, holder, fill_levels] = &maps.stacks;
        let counts = Counts::new(counts, a, b);
        let fill_level = FillLevel::new(fill_levels, Table::Counts)?;
        fill_level.reset(
            fill_level.used()?,
            fill_level::growth_threshold(0, counts.entries()),
        )?;
        let stacks = StackMaps {
            first,
            holder,
            fill_levels,
        };
        let max_entries = max_stacks.min(MAX_IN_KERNEL);
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(Self {
            tables: Mutex::new(Tables {
                counts,
                fill_level,
                stacks: Stacks::new(stacks, max_entries)?,
                log,
                max_entries,
                collected_at: Instant::now(),
                collected: Collected::default(),
                error: None,
            }),
            requests: &maps.requests,
            news: EventFd::from_flags(flags).context("failed to open an eventfd")?,
        })
    }

    /// Starts the thread.
    ///
    /// # Errors
    /// If there are no descriptors or threads left.
    pub(super) fn start<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) -> Result<Running> {
        let (stopped, stop) = pipe().context("failed to open a pipe")?;
        thread::Builder::new()
            .name("collect".into())
            .spawn_scoped(scope, move || {
                if let Err(error) = self.serve(&stopped) {
                    self.lock().error = Some(error);
                    self.announce();
                }
            })
            .context("failed to start a thread")?;
        Ok(Running { _stop: stop })
    }

    /// Collects what the kernel has counted until now, and returns all that was collected since the last call.
    ///
    /// If the run goes on, maps that filled too fast are replaced by larger ones.
    ///
    /// # Errors
    /// If a map cannot be read or replaced.
    pub(super) fn collect(&self, goes_on: bool) -> Result<Collected> {
        let mut tables = self.lock();
        tables.collect(goes_on)?;
        tables.take()
    }

    /// Returns what the thread has collected since the last call.
    ///
    /// # Errors
    /// If the thread has failed.
    pub(super) fn take(&self) -> Result<Collected> {
        // Read first: what is collected from now on makes the descriptor readable again.
        let _ = self.news.read();
        self.lock().take()
    }

    /// Collects whenever the kernel asks for space, until `stopped` is closed.
    fn serve(&self, stopped: &PipeReader) -> Result<()> {
        let requests: Events<u32> = Events::new(self.requests)?;
        let log = self.lock().log.as_fd().try_clone_to_owned();
        let log = log.context("failed to monitor the log of mappings")?;
        // Many events may have been counted since the probes went live.
        if self.lock().fill_level.needs_growth()? {
            self.lock().collect(true)?;
            self.announce();
        }
        loop {
            let has_room = self.lock().collected.changes.len() < MAX_CHANGES;
            let flags = |wanted| {
                if wanted {
                    PollFlags::POLLIN
                } else {
                    PollFlags::empty()
                }
            };
            let mut sources = [
                PollFd::new(stopped.as_fd(), PollFlags::POLLIN),
                PollFd::new(requests.as_fd(), PollFlags::POLLIN),
                PollFd::new(log.as_fd(), flags(has_room)),
            ];
            let timeout = match has_room {
                true => PollTimeout::NONE,
                false => PollTimeout::from(LOOK_AGAIN),
            };
            match poll(&mut sources, timeout) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(error).context("failed to wait for the kernel's tables"),
            }
            let [is_stopped, is_asked, has_changes] =
                sources.map(|source| source.any() == Some(true));
            if is_stopped {
                return Ok(());
            }
            if is_asked {
                requests.drain()?;
                self.lock().collect(true)?;
            } else if has_changes {
                self.lock().read_log();
            }
            if is_asked || has_changes {
                self.announce();
            }
        }
    }

    fn announce(&self) {
        // The counter is never full: it is read before 2^64 collections.
        let _ = self.news.write(1);
    }

    fn lock(&self) -> MutexGuard<'_, Tables<'map>> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsFd for Collector<'_> {
    /// The descriptor that is readable when [`Collector::take`] may return something.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.news.as_fd()
    }
}

impl Tables<'_> {
    fn take(&mut self) -> Result<Collected> {
        match self.error.take() {
            Some(error) => Err(error),
            None => {
                self.collected.lost_changes = self.log.lost();
                Ok(mem::take(&mut self.collected))
            }
        }
    }

    /// Takes the counts out of the kernel's maps.
    fn collect(&mut self, goes_on: bool) -> Result<()> {
        self.read_log();
        self.collected.settled = Some(self.collected.changes.len());
        if goes_on {
            self.renew_tables()?;
        }
        for (key, value) in self.counts.take()? {
            self.add(&key, &value)?;
        }
        // Nothing in the kernel refers to a stack of the previous table any more.
        self.stacks.keep([])?;
        self.stacks.forget_read();
        // Processes that have started since have counts, too.
        self.read_log();
        Ok(())
    }

    fn add(&mut self, key: &types::stack_count_key, value: &types::stack_count) -> Result<()> {
        let key = Key {
            user: key.user,
            kernel: key.kernel,
            pid: key.pid,
            comm: text::from_c(&key.comm),
        };
        let count = Count {
            events: value.events,
            bytes: value.bytes,
            cgroup: value.cgroup,
        };
        let ids = [key.user, key.kernel];
        let Collected { counts, stacks, .. } = &mut self.collected;
        if !stack_sums::add(counts, key, count, MAX_STACKS) {
            self.collected.without_stack += count.events;
            return Ok(());
        }
        // By the time at which the stacks are symbolized, the table may have been replaced.
        for id in ids {
            if !stacks.contains_key(&id)
                && let Some(stack) = self.stacks.get(id)?
            {
                stacks.insert(id, stack);
            }
        }
        Ok(())
    }

    /// Replaces the tables that have filled, the table of stacks first: a count may refer to the old table of stacks
    /// or to the new one.
    fn renew_tables(&mut self) -> Result<()> {
        if self.stacks.needs_growth()? {
            self.stacks.renew()?;
        }
        let now = Instant::now();
        let filled = TableUsage {
            entries: self.counts.entries(),
            used: self.fill_level.used()?,
            kept: 0,
            age: now - mem::replace(&mut self.collected_at, now),
        };
        if self.fill_level.needs_growth()? {
            self.counts
                .enlarge(filled.next_capacity(self.max_entries))?;
        }
        self.fill_level.reset(
            0,
            fill_level::growth_threshold(0, self.counts.next_entries()),
        )
    }

    fn read_log(&mut self) {
        if self.collected.changes.len() < MAX_CHANGES {
            self.collected.changes.extend(self.log.drain());
        }
    }
}
