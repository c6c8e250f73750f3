//! The table of distinct call stacks, which `bpf/include/stack.bpf.h` and its siblings fill.

use std::collections::{HashMap, HashSet};
use std::iter;
use std::mem;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use libbpf_rs::{ErrorKind, MapCore, MapFlags, MapHandle, MapType, OpenMapMut};
use nix::unistd::{SysconfVar, sysconf};

use crate::bpf::fill_level::{self, FillLevel, Table, TableUsage};
use crate::bpf::map_create;
use crate::bpf::types;
use crate::interpreters::raw_frame::RawFrame;

/// Maximum number of frames that the table holds of a stack.
pub const MAX_DEPTH: u32 = types::stack_layout::STACK_MAX_DEPTH.0;

/// Maximum number of entries of a stack.
const MAX_ENTRIES: usize = types::stack_layout::STACK_ENTRIES.0 as usize;

/// Bytes of kernel memory per entry: key, value, and the kernel's overhead.
pub const ENTRY_BYTES: u64 = 8 + size_of::<types::stack>() as u64 + 64;

/// Maximum number of entries of a table whose stacks only pending events refer to.
pub const MAX_EVENT_ENTRIES: u32 = 1 << 16;

/// Initial entries per online CPU. They have to last until the table is renewed, while each CPU adds new stacks.
const FIRST_ENTRIES_PER_CPU: u32 = 4096;

/// Minimum and maximum of the initial number of entries.
const FIRST_ENTRIES: RangeInclusive<u32> = 8192..=32768;

/// Initial number of entries where each stack comes with an event, which takes time, too.
pub const INITIAL_EVENT_ENTRIES: u32 = 2048;

/// Returns the initial number of entries where BPF programs count by stack: 5 MB on two CPUs.
pub fn first_entries() -> u32 {
    // If the C library cannot count the CPUs, the minimum is used.
    let online = sysconf(SysconfVar::_NPROCESSORS_ONLN).ok().flatten();
    let cpus = online
        .and_then(|cpus| u32::try_from(cpus).ok())
        .unwrap_or(0);
    let (least, most) = FIRST_ENTRIES.into_inner();
    cpus.saturating_mul(FIRST_ENTRIES_PER_CPU)
        .clamp(least, most)
}

/// Sizes an opened skeleton's table of stacks before load, for `first_entries` distinct stacks at first. None means
/// that no stacks are recorded: the table and `others`, the maps needed to record stacks, then get one entry each.
///
/// # Errors
/// If libbpf refuses a size.
pub fn set_capacity<const MAPS: usize>(
    stacks: &mut OpenMapMut<'_>,
    others: [&mut OpenMapMut<'_>; MAPS],
    first_entries: Option<u32>,
) -> Result<()> {
    if first_entries.is_none() {
        for map in others {
            map_create::set_capacity(map, 1)?;
        }
    }
    map_create::set_capacity(stacks, first_entries.unwrap_or(1))
}

/// The id of a stack that could not be recorded or stored.
pub(crate) const LOST: u64 = types::stack_id::STACK_LOST.0 as u64;

/// The id of "no stack": the user stack of a kernel thread, the kernel stack of user code.
pub(crate) const NO_STACK: u64 = types::stack_id::STACK_NONE.0 as u64;

/// The flag of an entry whose addresses are the kernel's.
const KERNEL: u8 = types::stack_flags::STACK_KERNEL.0 as u8;

/// Side of a stack: user space or the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Code of a process.
    User,
    /// Code of the kernel.
    Kernel,
}

/// A stack, innermost frame first. A stack may have no frame at all, such as a kernel thread's user stack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stack {
    /// Side that the addresses belong to.
    pub side: Side,
    /// The frames.
    pub frames: Vec<RawFrame>,
    /// Why there is no further frame.
    pub end: WalkEnd,
    /// Whether each frame is known to be in code. A walk by frame pointers alone does not check that.
    pub checked: bool,
}

/// Reason for the end of a stack walk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WalkEnd {
    /// The walk ended at the outermost frame, or at the last frame pointer if only frame pointers were requested.
    Root,
    /// The walk ended at the depth limit.
    Depth,
    /// The walk ended at the last frame pointer, as there were no tables.
    NoTables,
    /// The walk ended in code without unwind information.
    NoRule,
    /// The walk ended before a frame in no code that the process is known to have mapped.
    NoCode,
    /// The walk ended where the stack could not be read.
    Unreadable,
    /// The walk ended before a frame that would be farther from the stack's base than the last one.
    Backwards,
    /// The walk ended before frames of a virtual thread, which are in Java's heap.
    InJavaHeap,
}

impl WalkEnd {
    fn read(end: u8) -> Self {
        match types::stack_end(end.into()) {
            types::stack_end::STACK_END_ROOT | types::stack_end::STACK_END_FRAME_POINTER => {
                Self::Root
            }
            types::stack_end::STACK_END_DEPTH => Self::Depth,
            types::stack_end::STACK_END_NO_TABLES => Self::NoTables,
            types::stack_end::STACK_END_NO_RULE => Self::NoRule,
            types::stack_end::STACK_END_UNREADABLE => Self::Unreadable,
            types::stack_end::STACK_END_BACKWARDS => Self::Backwards,
            types::stack_end::STACK_END_IN_JAVA_HEAP => Self::InJavaHeap,
            _ => Self::NoCode,
        }
    }

    /// Returns why outer frames are missing, if they are. `module` is the module of the last frame.
    pub fn truncated(self, module: Option<&str>) -> Option<String> {
        Some(match self {
            Self::Root => return None,
            Self::Depth => "deeper than the frame limit".into(),
            Self::NoTables => "by frame pointers alone".into(),
            Self::NoRule => format!("no unwind info: {}", module.unwrap_or("generated code")),
            Self::NoCode => "called from no known code".into(),
            Self::Unreadable => "stack not readable".into(),
            Self::Backwards => "stack is inconsistent".into(),
            Self::InJavaHeap => "a virtual thread's callers are in Java's heap".into(),
        })
    }
}

impl Stack {
    /// The stack of an event that has none: it has no frame.
    fn none() -> Self {
        Self {
            side: Side::User,
            frames: Vec::new(),
            end: WalkEnd::Root,
            checked: true,
        }
    }

    /// Returns an address within the instruction of each native frame, innermost first.
    pub fn instructions(&self) -> impl Iterator<Item = u64> + Clone {
        self.frames.iter().filter_map(|place| place.instruction())
    }

    /// Decodes a stack from its first entry and from `rest`, the entries with its remaining frames, as far as they are
    /// known.
    fn read(entry: &types::stack, rest: &[types::stack]) -> Self {
        let side = match entry.flags & KERNEL {
            0 => Side::User,
            _ => Side::Kernel,
        };
        let place = |(word, interrupted)| match side {
            Side::User => RawFrame::of_user(word, interrupted),
            Side::Kernel => RawFrame::of_native(word, interrupted),
        };
        let entries = iter::once(entry).chain(rest);
        let frames: Vec<RawFrame> = entries.flat_map(words).map(place).collect();
        let is_cut = frames.len() < entry.depth as usize;
        Self {
            side,
            frames,
            end: if is_cut {
                WalkEnd::Depth
            } else {
                WalkEnd::read(entry.end)
            },
            checked: ![
                types::stack_end::STACK_END_FRAME_POINTER,
                types::stack_end::STACK_END_NO_TABLES,
            ]
            .contains(&types::stack_end(entry.end.into())),
        }
    }
}

/// Returns the words of an entry, each with whether it is an instruction that was interrupted.
fn words(entry: &types::stack) -> impl Iterator<Item = (u64, bool)> {
    let is_interrupted = |frame: usize| entry.interrupted & (1 << frame) != 0;
    let words = entry.pc.iter().take(entry.depth as usize).enumerate();
    words.map(move |(frame, &word)| (word, is_interrupted(frame)))
}

/// Collects the maps of a loaded skeleton that make up the table of stacks.
#[macro_export]
macro_rules! stack_maps {
    ($skel:expr) => {
        $crate::stacks::table::StackMaps {
            first: &$skel.maps.stacks,
            holder: &$skel.maps.stack_maps,
            fill_levels: &$skel.maps.fill_levels,
        }
    };
}

/// Maps of a skeleton that make up the table of stacks, as collected by [`stack_maps!`].
#[derive(Debug)]
pub struct StackMaps<'map, M> {
    /// `stacks`, the map that BPF programs use first.
    pub first: &'map M,
    /// `stack_maps`, the map of maps that holds the replacement of `stacks`.
    pub holder: &'map M,
    /// `fill_levels`, the fill levels of tables.
    pub fill_levels: &'map M,
}

/// Source of stacks by their ids.
pub trait StackSource {
    /// Returns the stack with this id, or None if the stack was lost.
    ///
    /// # Errors
    /// If the stack cannot be read.
    fn get(&mut self, id: u64) -> Result<Option<Arc<Stack>>>;
}

impl<M: MapCore> StackSource for Stacks<'_, M> {
    fn get(&mut self, id: u64) -> Result<Option<Arc<Stack>>> {
        Stacks::get(self, id)
    }
}

/// Stacks that were read from a table which may have been replaced since.
#[derive(Debug)]
pub(crate) struct ReadStacks {
    stacks: HashMap<u64, Arc<Stack>>,
    none: Arc<Stack>,
}

impl Default for ReadStacks {
    fn default() -> Self {
        Self {
            stacks: HashMap::new(),
            none: Arc::new(Stack::none()),
        }
    }
}

impl ReadStacks {
    /// Adds stacks, each with its id.
    pub(crate) fn extend(&mut self, stacks: HashMap<u64, Arc<Stack>>) {
        if self.stacks.is_empty() {
            self.stacks = stacks;
        } else {
            self.stacks.extend(stacks);
        }
    }

    /// Forgets all stacks.
    pub(crate) fn clear(&mut self) {
        self.stacks = HashMap::new();
    }
}

impl StackSource for ReadStacks {
    fn get(&mut self, id: u64) -> Result<Option<Arc<Stack>>> {
        let stack = match id {
            NO_STACK => Some(&self.none),
            _ => self.stacks.get(&id),
        };
        Ok(stack.cloned())
    }
}

/// The table of stacks, which is read by id and renewed before it is full.
///
/// A renewal ([`Stacks::renew`]) replaces the map with an empty one. [`Stacks::keep`] then copies the stacks that are
/// still referred to. No reference is missed: BPF programs that had an id from the old map have ended when `renew`
/// returns, and later ones store their stacks in the new map.
pub struct Stacks<'map, M> {
    maps: StackMaps<'map, M>,
    fill_level: FillLevel,
    /// Map that has replaced the first one; None before the first renewal.
    current: Option<MapHandle>,
    /// Map before the current one, until [`Stacks::keep`] has copied what is still referred to.
    previous: Option<Previous>,
    /// Capacity of the map in use, in entries.
    entries: u32,
    /// Maximum capacity of a map, in entries.
    max_entries: u32,
    /// Number of entries kept at the last renewal. `renewed` is when that renewal began.
    kept: u64,
    renewed: Instant,
    /// Ids that are referred to although their stacks did not fit into the new map of a renewal.
    lost: HashSet<u64>,
    /// Number of stacks that did not fit, over all renewals.
    lost_count: u64,
    known: HashMap<u64, Arc<Stack>>,
    none: Arc<Stack>,
}

/// Map that has been replaced, to which BPF programs add no more stacks.
enum Previous {
    First,
    Other(MapHandle),
}

impl<'map, M: MapCore> Stacks<'map, M> {
    /// Creates the table from a skeleton's maps. A map may grow to `most` entries.
    ///
    /// # Errors
    /// If the map that says how full the table is cannot be mapped.
    pub fn new(maps: StackMaps<'map, M>, max_entries: u32) -> Result<Self> {
        let stacks = Self {
            fill_level: FillLevel::new(maps.fill_levels, Table::Stacks)?,
            current: None,
            previous: None,
            entries: maps.first.max_entries(),
            max_entries,
            kept: 0,
            renewed: Instant::now(),
            lost: HashSet::new(),
            lost_count: 0,
            known: HashMap::new(),
            none: Arc::new(Stack::none()),
            maps,
        };
        let used = stacks.fill_level.used()?;
        stacks
            .fill_level
            .reset(used, fill_level::growth_threshold(used, stacks.entries))?;
        Ok(stacks)
    }

    /// Returns the stack with this id, or None if the stack was lost.
    ///
    /// # Errors
    /// If the table cannot be read, or has an entry of another size.
    pub fn get(&mut self, id: u64) -> Result<Option<Arc<Stack>>> {
        if id == NO_STACK {
            return Ok(Some(Arc::clone(&self.none)));
        }
        if id == LOST {
            return Ok(None);
        }
        if let Some(stack) = self.known.get(&id) {
            return Ok(Some(Arc::clone(stack)));
        }
        let Some(bytes) = self.entry(id)? else {
            return Ok(None);
        };
        let entry: &types::stack = types::view(&bytes)?;
        let rest = rest_of(entry, |id| self.entry(id))?;
        let rest = rest.iter().map(|(_, bytes)| Ok(*types::view(bytes)?));
        let stack = Arc::new(Stack::read(entry, &rest.collect::<Result<Vec<_>>>()?));
        self.known.insert(id, Arc::clone(&stack));
        Ok(Some(stack))
    }

    /// Returns the id, or the id of all lost stacks if a renewal has lost the stack.
    ///
    /// # Errors
    /// If the table cannot be read.
    pub fn id_or_lost(&mut self, id: u64) -> Result<u64> {
        if self.lost.contains(&id) && self.get(id)?.is_none() {
            return Ok(LOST);
        }
        Ok(id)
    }

    /// Returns how many stacks renewals have lost for lack of space, although something referred to them.
    pub fn lost(&self) -> u64 {
        self.lost_count
    }

    /// Whether the table should be renewed.
    ///
    /// # Errors
    /// If the map of fill levels has no entry for this table.
    pub fn needs_growth(&self) -> Result<bool> {
        self.fill_level.needs_growth()
    }

    /// Whether the table has as many entries as it may have.
    pub fn is_largest(&self) -> bool {
        self.entries >= self.max_entries
    }

    /// Replaces the map in use with an empty one, which is larger if the old map has filled fast or if much of it was
    /// kept. The stacks of the old map can be read until [`Stacks::keep`] or the next renewal. A renewal takes an RCU
    /// grace period, 10 to 30 ms.
    ///
    /// # Errors
    /// If there is no memory for another map, or the kernel refuses to insert the map.
    pub fn renew(&mut self) -> Result<()> {
        let begun = Instant::now();
        let filled = TableUsage {
            entries: self.entries,
            used: self.fill_level.used()?,
            kept: self.kept,
            age: begun - self.renewed,
        };
        let entries = filled.next_capacity(self.max_entries);
        let sizes = (size_of::<u64>(), size_of::<types::stack>());
        let map = map_create::create(MapType::Hash, "stacks", sizes, entries, 0)
            .context("not enough memory for the stack table")?;
        self.fill_level
            .reset(0, fill_level::growth_threshold(0, entries))?;
        let fd = map.as_fd().as_raw_fd();
        self.maps
            .holder
            .update(&0u32.to_ne_bytes(), &fd.to_ne_bytes(), MapFlags::ANY)
            .context("failed to replace the table of stacks")?;
        let previous = self.current.replace(map);
        self.previous = Some(previous.map_or(Previous::First, Previous::Other));
        self.entries = entries;
        self.kept = 0;
        self.renewed = begun;
        Ok(())
    }

    /// Copies the stacks with these ids from the previous map, and drops that map. A stack that does not fit is lost
    /// ([`Stacks::lost`]).
    ///
    /// # Errors
    /// If the previous map cannot be read.
    pub fn keep(&mut self, ids: impl IntoIterator<Item = u64>) -> Result<()> {
        let (Some(previous), Some(current)) = (self.previous.take(), &self.current) else {
            return Ok(());
        };
        let lost_before = mem::take(&mut self.lost);
        let mut copied = 0;
        for id in ids {
            let entry = |id: u64| match &previous {
                Previous::First => lookup(self.maps.first, &id.to_ne_bytes()),
                Previous::Other(map) => lookup(map, &id.to_ne_bytes()),
            };
            let Some(stack) = entry(id)? else {
                if lost_before.contains(&id) {
                    self.lost.insert(id);
                }
                continue;
            };
            let rest = rest_of(types::view(&stack)?, entry)?;
            self.kept += 1 + rest.len() as u64;
            // The last entry comes first, so that whoever finds a stack finds all of it.
            let entries = rest.into_iter().rev().chain([(id, stack)]);
            match copy(entries, current) {
                Some(copies) => copied += copies,
                None => {
                    self.lost.insert(id);
                    self.lost_count += 1;
                }
            }
        }
        // The threshold depends on kept entries alone: those that BPF programs have added since may soon be dropped.
        let used = self.fill_level.used()? + copied;
        self.fill_level
            .reset(used, fill_level::growth_threshold(self.kept, self.entries))
    }

    /// Renews the table if it needs to grow, for tools in which only events refer to stacks.
    ///
    /// Call it when all pending events have been handled. Events that arrive meanwhile find their stacks until the next
    /// renewal. Stacks that were read stay cached. Without memory for another map the table stays as it is, and stacks
    /// that do not fit are lost and counted: these tools also run where memory runs out.
    ///
    /// # Errors
    /// If the map in use cannot be read, or its fill level cannot be set. A lack of memory is no error.
    pub fn renew_for_events(&mut self) -> Result<()> {
        if !self.needs_growth()? {
            return Ok(());
        }
        self.keep([])?;
        if self.renew().is_ok() {
            return Ok(());
        }
        let used = self.fill_level.used()?;
        self.fill_level
            .reset(used, fill_level::growth_threshold(used, self.entries))
    }

    /// Returns the capacity of the table, in entries.
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Clears the cache of stacks that were read. Call it when they will not be requested again.
    pub fn forget_read(&mut self) {
        self.known.clear();
    }

    fn entry(&self, id: u64) -> Result<Option<Vec<u8>>> {
        let id = id.to_ne_bytes();
        let previous = match &self.previous {
            Some(Previous::First) => lookup(self.maps.first, &id)?,
            Some(Previous::Other(map)) => lookup(map, &id)?,
            None => None,
        };
        if previous.is_some() {
            return Ok(previous);
        }
        match &self.current {
            Some(map) => lookup(map, &id),
            None => lookup(self.maps.first, &id),
        }
    }
}

/// Returns the entries behind the first entry of a stack, each with its id, as far as `find` finds them.
fn rest_of(
    first: &types::stack,
    find: impl Fn(u64) -> Result<Option<Vec<u8>>>,
) -> Result<Vec<(u64, Vec<u8>)>> {
    let mut entries = Vec::new();
    let mut next = first.rest;
    while next != LOST
        && entries.len() + 1 < MAX_ENTRIES
        && let Some(entry) = find(next)?
    {
        let id = mem::replace(&mut next, types::view::<types::stack>(&entry)?.rest);
        entries.push((id, entry));
    }
    Ok(entries)
}

/// Copies entries to a map. Returns how many are new to the map, or None if the map is full.
fn copy(entries: impl Iterator<Item = (u64, Vec<u8>)>, to: &MapHandle) -> Option<u64> {
    let mut copied = 0;
    for (id, entry) in entries {
        match to.update(&id.to_ne_bytes(), &entry, MapFlags::NO_EXIST) {
            Ok(()) => copied += 1,
            // A BPF program has stored the stack since.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(_) => return None,
        }
    }
    Some(copied)
}

fn lookup(map: &impl MapCore, id: &[u8]) -> Result<Option<Vec<u8>>> {
    map.lookup(id, MapFlags::ANY)
        .context("failed to read a stack")
}

#[cfg(test)]
mod tests;
