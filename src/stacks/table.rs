//! The table of distinct call stacks, which `bpf/include/stack.bpf.h` and its siblings fill.

use std::collections::{HashMap, HashSet};
use std::mem;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd};
use std::rc::Rc;
use std::time::Instant;

use anyhow::{Context, Result};
use libbpf_rs::{ErrorKind, MapCore, MapFlags, MapHandle, MapType, OpenMapMut};
use nix::unistd::{SysconfVar, sysconf};

use crate::bpf::map_create;
use crate::bpf::room::{self, Filled, Room, Table};
use crate::bpf::types;

mod place;

pub use place::Place;

/// Frames that the table holds of a stack at most.
pub const MAX_DEPTH: u32 = types::stack_layout::STACK_MAX_DEPTH.0;

/// Bytes that an entry takes of the kernel's memory: key, value, and the kernel's own.
pub const ENTRY_BYTES: u64 = 8 + size_of::<types::stack>() as u64 + 64;

/// Entries that the table may grow to, where only events that were not looked at yet refer to it.
pub const MAX_OF_EVENTS: u32 = 1 << 16;

/// Entries that a table begins with for each CPU that is online: they have to last until more room is
/// made, and each CPU brings new stacks meanwhile.
const FIRST_ENTRIES_PER_CPU: u32 = 2048;

/// Entries that a table begins with at least and at most.
const FIRST_ENTRIES: RangeInclusive<u32> = 4096..=16384;

/// Entries that the table begins with where each stack comes with an event, which takes its time, too.
pub const FIRST_OF_EVENTS: u32 = 2048;

/// Entries that the table of distinct stacks begins with where the kernel counts by them: 4.6 MB on two CPUs.
pub fn first_entries() -> u32 {
    // What the C library cannot count is taken for few.
    let online = sysconf(SysconfVar::_NPROCESSORS_ONLN).ok().flatten();
    let cpus = online
        .and_then(|cpus| u32::try_from(cpus).ok())
        .unwrap_or(0);
    let (least, most) = FIRST_ENTRIES.into_inner();
    cpus.saturating_mul(FIRST_ENTRIES_PER_CPU)
        .clamp(least, most)
}

/// Sizes an opened skeleton's table of stacks, and the maps that serve to take them, before load: for so
/// many distinct stacks at first, or, with None, for none at all.
///
/// # Errors
/// If libbpf refuses a size.
pub fn size<const MAPS: usize>(
    stacks: &mut OpenMapMut<'_>,
    others: [&mut OpenMapMut<'_>; MAPS],
    first_entries: Option<u32>,
) -> Result<()> {
    if first_entries.is_none() {
        for map in others {
            map_create::size(map, 1)?;
        }
    }
    map_create::size(stacks, first_entries.unwrap_or(1))
}

/// The id of a stack that could not be taken or stored.
const LOST: u64 = types::stack_id::STACK_LOST.0 as u64;

/// The id of "no stack": the user stack of a kernel thread, the kernel stack of user code.
const NO_STACK: u64 = types::stack_id::STACK_NONE.0 as u64;

/// The bit of an entry's flags for addresses of the kernel.
const KERNEL: u8 = types::stack_flags::STACK_KERNEL.0 as u8;

/// Whose code a stack goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// A process's.
    User,
    /// The kernel's.
    Kernel,
}

/// One stack, innermost frame first. It may have no frame at all, as a kernel thread's user stack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stack {
    /// Whose addresses these are.
    pub side: Side,
    /// The frames.
    pub places: Vec<Place>,
    /// Why there is no further frame.
    pub end: End,
    /// Whether each frame is known to be in code; frame pointers alone do not tell.
    pub checked: bool,
}

/// Where a walk up a stack has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum End {
    /// The walk ended at the outermost frame; or, by frame pointers alone, as that was asked for, at the last.
    Root,
    /// The walk ended at the depth limit.
    Depth,
    /// The walk ended at the last frame pointer, as there were no tables.
    NoTables,
    /// The walk ended in code without unwind information.
    NoRule,
    /// The walk ended before a frame in no code that the process is known to have mapped.
    NoCode,
    /// Where the stack could not be read.
    Unreadable,
    /// Before a frame that would be nearer to the stack's top.
    Backwards,
    /// Before frames of a virtual thread that are in Java's heap.
    InJavaHeap,
}

impl End {
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

    /// Why frames are missing, if they are. `module` is where the last one's code is.
    pub fn truncated(self, module: Option<&str>) -> Option<String> {
        Some(match self {
            Self::Root => return None,
            Self::Depth => "deeper than --perf-max-stack-depth".into(),
            Self::NoTables => "by frame pointers alone".into(),
            Self::NoRule => format!("no unwind info: {}", module.unwrap_or("generated code")),
            Self::NoCode => "called from no known code".into(),
            Self::Unreadable => "stack not readable".into(),
            Self::Backwards => "stack makes no sense".into(),
            Self::InJavaHeap => "a virtual thread's callers are in Java's heap".into(),
        })
    }
}

impl Stack {
    /// The instructions that the native frames are at, innermost first.
    pub fn instructions(&self) -> impl Iterator<Item = u64> {
        self.places.iter().filter_map(|place| place.instruction())
    }

    /// The stack of an entry, and of the one with the rest of its frames.
    fn read(entry: &types::stack, rest: Option<&types::stack>) -> Self {
        let side = match entry.flags & KERNEL {
            0 => Side::User,
            _ => Side::Kernel,
        };
        let place = |(word, interrupted)| match side {
            Side::User => Place::of_user(word, interrupted),
            Side::Kernel => Place::of_native(word, interrupted),
        };
        let is_cut = rest.is_none() && entry.depth as usize > entry.pc.len();
        Self {
            side,
            places: words(entry)
                .chain(rest.into_iter().flat_map(words))
                .map(place)
                .collect(),
            end: if is_cut {
                End::Depth
            } else {
                End::read(entry.end)
            },
            checked: ![
                types::stack_end::STACK_END_FRAME_POINTER,
                types::stack_end::STACK_END_NO_TABLES,
            ]
            .contains(&types::stack_end(entry.end.into())),
        }
    }
}

/// The words of an entry, and whether each is an instruction that was interrupted.
fn words(entry: &types::stack) -> impl Iterator<Item = (u64, bool)> {
    let is_interrupted = |frame: usize| entry.interrupted[frame / 64] & (1 << (frame % 64)) != 0;
    let words = entry.pc.iter().take(entry.depth as usize).enumerate();
    words.map(move |(frame, &word)| (word, is_interrupted(frame)))
}

/// The maps of a loaded skeleton that the table of stacks is made of.
#[macro_export]
macro_rules! stack_maps {
    ($skel:expr) => {
        $crate::stacks::table::StackMaps {
            first: &$skel.maps.stacks,
            holder: &$skel.maps.stack_maps,
            rooms: &$skel.maps.rooms,
        }
    };
}

/// What [`stack_maps!`] makes.
#[derive(Debug)]
pub struct StackMaps<'map, M> {
    /// `stacks`, which programs begin with.
    pub first: &'map M,
    /// `stack_maps`, for another in its place.
    pub holder: &'map M,
    /// `rooms`.
    pub rooms: &'map M,
}

/// The table of stacks, read by id, and renewed before it is full.
///
/// To renew it is to put an empty map in its place, to which whatever is still referred to is copied
/// ([`Stacks::renew`], [`Stacks::keep`]). No reference is missed: programs that had an id from the
/// old map have ended when `renew` returns, and all others store their stacks in the new one.
pub struct Stacks<'map, M> {
    maps: StackMaps<'map, M>,
    room: Room,
    /// The map in the place of the first.
    current: Option<MapHandle>,
    /// The map before it, until it is known what is referred to.
    previous: Option<Previous>,
    /// Entries of the map in use.
    entries: u32,
    /// Entries that the map may have.
    most: u32,
    /// How many stacks were kept at the last renewal, and when that began.
    kept: u64,
    renewed: Instant,
    /// Ids that were referred to when a renewal had no room for their stacks.
    lost: HashSet<u64>,
    /// How many such stacks there were.
    lost_count: u64,
    known: HashMap<u64, Rc<Stack>>,
    none: Rc<Stack>,
}

/// A map that programs add no more stacks to.
enum Previous {
    First,
    Other(MapHandle),
}

impl<'map, M: MapCore> Stacks<'map, M> {
    /// The table of this skeleton, which may grow to `most` entries.
    ///
    /// # Errors
    /// If the map that says how full the table is cannot be mapped.
    pub fn new(maps: StackMaps<'map, M>, most: u32) -> Result<Self> {
        let none = Stack {
            side: Side::User,
            places: Vec::new(),
            end: End::Root,
            checked: true,
        };
        let stacks = Self {
            room: Room::new(maps.rooms, Table::Stacks)?,
            current: None,
            previous: None,
            entries: maps.first.max_entries(),
            most,
            kept: 0,
            renewed: Instant::now(),
            lost: HashSet::new(),
            lost_count: 0,
            known: HashMap::new(),
            none: Rc::new(none),
            maps,
        };
        let taken = stacks.room.taken()?;
        stacks
            .room
            .begin(taken, room::enough(taken, stacks.entries))?;
        Ok(stacks)
    }

    /// The stack with this id; None if it was lost.
    ///
    /// # Errors
    /// If the table cannot be read, or has an entry of another size.
    pub fn get(&mut self, id: u64) -> Result<Option<Rc<Stack>>> {
        if id == NO_STACK {
            return Ok(Some(Rc::clone(&self.none)));
        }
        if id == LOST {
            return Ok(None);
        }
        if let Some(stack) = self.known.get(&id) {
            return Ok(Some(Rc::clone(stack)));
        }
        let Some(bytes) = self.entry(id)? else {
            return Ok(None);
        };
        let entry: &types::stack = types::view(&bytes)?;
        let rest = match entry.rest {
            LOST => None,
            rest => self.entry(rest)?,
        };
        let rest = rest.as_deref().map(types::view).transpose()?;
        let stack = Rc::new(Stack::read(entry, rest));
        self.known.insert(id, Rc::clone(&stack));
        Ok(Some(stack))
    }

    /// The id, or that of all lost stacks if a renewal had no room for this one.
    ///
    /// # Errors
    /// If the table cannot be read.
    pub fn found(&mut self, id: u64) -> Result<u64> {
        if self.lost.contains(&id) && self.get(id)?.is_none() {
            return Ok(LOST);
        }
        Ok(id)
    }

    /// How many stacks the renewals had no room for, although they were referred to.
    pub fn lost(&self) -> u64 {
        self.lost_count
    }

    /// Whether the table should be renewed.
    ///
    /// # Errors
    /// If the map that says how full the table is has no such entry.
    pub fn is_crowded(&self) -> Result<bool> {
        self.room.is_crowded()
    }

    /// Puts an empty map in the place of the one in use, a larger one if that has filled fast or much
    /// was kept of it. What the old one has can be read until [`Stacks::keep`] or the next renewal.
    /// A renewal takes a grace period of the kernel, 10 to 30 ms.
    ///
    /// # Errors
    /// If there is no memory for another map, or the kernel does not take it.
    pub fn renew(&mut self) -> Result<()> {
        let begun = Instant::now();
        let filled = Filled {
            entries: self.entries,
            taken: self.room.taken()?,
            kept: self.kept,
            for_time: begun - self.renewed,
        };
        let entries = filled.next(self.most);
        let sizes = (size_of::<u64>(), size_of::<types::stack>());
        let map = map_create::create(MapType::Hash, "stacks", sizes, entries, 0)
            .context("no room for more stacks; lower --stack-storage-size")?;
        self.room.begin(0, room::enough(0, entries))?;
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

    /// Copies these from the map that was in use before, and forgets the rest of it. A stack that there
    /// is no room for is lost ([`Stacks::lost`]).
    ///
    /// # Errors
    /// If the map that was in use before cannot be read.
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
            let rest = match types::view::<types::stack>(&stack)?.rest {
                LOST => None,
                rest => entry(rest)?.map(|entry| (rest, entry)),
            };
            self.kept += 1 + u64::from(rest.is_some());
            // The rest first: who finds a stack finds all of it.
            let entries = rest.into_iter().chain([(id, stack)]);
            match copy(entries, current) {
                Some(copies) => copied += copies,
                None => {
                    self.lost.insert(id);
                    self.lost_count += 1;
                }
            }
        }
        // Measured by what was kept: what programs have added since may be gone soon.
        let taken = self.room.taken()? + copied;
        self.room
            .begin(taken, room::enough(self.kept, self.entries))
    }

    /// Renews the table if it is crowded, where nothing but events refers to stacks.
    ///
    /// Call it when all events that there were have been looked at: those that come meanwhile find
    /// their stacks until the next renewal. Stacks that were read stay known. Without memory for
    /// another table all stays as it is, and what has no room is lost and counted: these tools also
    /// run where memory runs out.
    ///
    /// # Errors
    /// If the table in use cannot be read or counted in; a lack of memory is none.
    pub fn renew_for_events(&mut self) -> Result<()> {
        if !self.is_crowded()? {
            return Ok(());
        }
        self.keep([])?;
        if self.renew().is_ok() {
            return Ok(());
        }
        let taken = self.room.taken()?;
        self.room.begin(taken, room::enough(taken, self.entries))
    }

    /// How many stacks the table has room for.
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Forgets what was read, as it will not be asked for again.
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

/// Copies entries to a map. Returns how many it did not have before; None if it has no room.
fn copy(entries: impl Iterator<Item = (u64, Vec<u8>)>, to: &MapHandle) -> Option<u64> {
    let mut copied = 0;
    for (id, entry) in entries {
        match to.update(&id.to_ne_bytes(), &entry, MapFlags::NO_EXIST) {
            Ok(()) => copied += 1,
            // A program has met it since.
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
