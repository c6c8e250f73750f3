//! One image of a process, and what is found in it.

use std::collections::{HashMap, HashSet};

use anyhow::Result;
use memtools::heap::blocks::Heap;
use memtools::heap::capture::Request;
use memtools::heap::file_words;
use memtools::heap::glibc;
use memtools::heap::glibc::State;
use memtools::heap::glibc::usage::HeapUsage;
use memtools::heap::growth::follow::Followed;
use memtools::heap::growth::judge::{OtherParts, Point};
use memtools::heap::image::Image;
use memtools::heap::kernel;
use memtools::heap::names::{ModuleGlobals, Names, pymalloc};
use memtools::heap::reach::{Class, Reach};
use memtools::heap::runtimes::Runtime;
use memtools::heap::walk::Walked;
use memtools::host::values::Values;
use memtools::verdict;

/// Process at one moment: its image, heap and types of blocks.
pub(super) struct HeapSnapshot {
    pub(super) image: Image,
    pub(super) heap: Heap,
    pub(super) names: Names,
    /// Why there is no heap that can be walked, if so.
    pub(super) without_heap: Option<String>,
    /// Bytes of files in memory that the kernel has counted (RssFile).
    file_bytes: u64,
    /// Bytes in memory that are in arenas of glibc but the main one, and in no block.
    arenas_free: u64,
}

/// A block's address and size.
pub(super) type BlockId = (u64, u64);

impl HeapSnapshot {
    /// Takes an image. Returns None if its heap is inconsistent, such as that of a process whose threads are in the
    /// middle of malloc most of the time.
    ///
    /// # Errors
    /// If no image can be taken, or if there is a heap that cannot be walked as a whole.
    pub(super) fn take(request: &Request) -> Result<Option<Self>> {
        let mut kept = kernel::words(request.process.pid());
        let walked = Walked::take(request)?;
        let status = Values::read(format!("/proc/{}/status", request.process.pid()));
        let file_bytes = status.unwrap_or_default().get_or_zero("RssFile");
        kept.extend(kernel::words(request.process.pid()));
        if walked.inconsistency().is_some() {
            return Ok(None);
        }
        let without_heap = walked.without_heap().map(str::to_owned);
        if without_heap.is_none() {
            verdict::expect_whole(&walked)?;
        }
        let glibc = walked.glibc.as_ref();
        let arenas_free = glibc.map_or(0, |walk| free_in_other_arenas(&walked.image, walk));
        let Walked {
            mut image, heap, ..
        } = walked;
        image.kernel_words = kept;
        let (heap, _) = pymalloc::with_pools(&image, heap);
        let names = verdict::types_of(request.process, &image, &heap);
        Ok(Some(Self {
            image,
            heap,
            names,
            without_heap,
            file_bytes,
            arenas_free,
        }))
    }

    /// Returns the sums of the image as a point, which is at `seconds`.
    pub(super) fn point(&self, seconds: f64) -> Point {
        let present = |range| self.image.resident_bytes(range);
        let regions = self.heap.regions.iter().cloned();
        let heap_resident: u64 = regions.map(present).sum();
        let blocks = self.heap.blocks();
        let live_resident: u64 = blocks.iter().map(|block| present(block.range())).sum();
        let free_resident = heap_resident.saturating_sub(live_resident);
        let (others, outside) = self.other_parts(self.arenas_free.min(free_resident));
        Point {
            seconds,
            blocks: blocks.len() as u64,
            live: self.heap.block_bytes(),
            heap_resident,
            free_resident,
            resident: heap_resident + outside,
            others,
        }
    }

    /// Returns the bytes in memory outside of the heap, by use, and their sum. All but constants and code, which are
    /// not in the image, are of the moment of the image.
    fn other_parts(&self, arenas: u64) -> (OtherParts, u64) {
        let image = &self.image;
        let runtime = Runtime::find(&image.areas);
        // Go has the stacks of goroutines in its heap.
        let has_goroutines = runtime == Some(Runtime::Go);
        let threads = image.threads.iter();
        let stacks: HashSet<u64> = threads
            .filter_map(|thread| Some(image.area(thread.stack_pointer)?.mapping.range.start))
            .collect();
        let (mut parts, mut mapped, mut shared_files) = (OtherParts::default(), 0, 0);
        parts.arenas = arenas;
        let mut regions = self.heap.regions.iter().peekable();
        for area in &image.areas {
            let range = &area.mapping.range;
            let mut bytes = image.resident_bytes(range.clone());
            while regions
                .next_if(|region| region.end <= range.start)
                .is_some()
            {}
            // A region of the heap can go on in the next area.
            let mut inside = regions.clone();
            while let Some(region) = inside.next_if(|region| region.start < range.end) {
                let region = region.start.max(range.start)..region.end.min(range.end);
                bytes = bytes.saturating_sub(image.resident_bytes(region));
            }
            let part = if area.shared {
                shared_files += if area.is_in_memory() { 0 } else { bytes };
                &mut parts.shared
            } else if stacks.contains(&range.start) && !has_goroutines || area.name() == b"[stack]"
            {
                &mut parts.stacks
            } else if area.has_file() {
                &mut parts.files
            } else if runtime.is_some() {
                &mut parts.runtime
            } else {
                &mut mapped
            };
            *part += bytes;
        }
        parts.files += self.file_bytes.saturating_sub(shared_files);
        let OtherParts {
            stacks,
            runtime,
            shared,
            files,
            ..
        } = parts;
        (parts, stacks + runtime + shared + files + mapped)
    }

    /// Finds what refers to the blocks.
    ///
    /// # Errors
    /// If there are too many blocks.
    pub(super) fn reach(&mut self) -> Result<Reach> {
        self.image.file_words = file_words::read(&self.image);
        Reach::new(&self.image, &self.heap, &self.names.python)
    }

    /// Finds what holds each of these [`newest`] blocks, by their groups' numbers: the root at which the block's chain
    /// begins.
    pub(super) fn holders(&self, reach: &Reach, newest: Newest) -> HashMap<u32, String> {
        let root = |number| reach.chain(number).1;
        let roots = newest.values().filter_map(|&(_, number)| root(number));
        let names = verdict::RootNames::of(&self.image, roots);
        let globals = ModuleGlobals::of(&self.image, &self.heap, &self.names);
        let name = |number| {
            let (mut chain, root) = reach.chain(number);
            let global = verdict::python_global(&globals, number, &mut chain);
            global.unwrap_or_else(|| names.variable(&self.image, root))
        };
        newest
            .into_iter()
            .map(|(group, (_, number))| (group, name(number)))
            .collect()
    }
}

/// Numbers of groups, each with a block: the number of the first point at which it existed, and its own number.
pub(super) type Newest = HashMap<u32, (u32, usize)>;

/// Finds the newest reachable block of each of these groups. A block of the last point alone is taken only if there is
/// no other new one: it may still be in a register, and not yet where it will be held.
pub(super) fn newest(reach: &Reach, followed: &[Followed], groups: &HashSet<u32>) -> Newest {
    let last = followed.iter().map(|one| one.since).max();
    let rank = |since: u32| (since > 0 && Some(since) < last, since);
    let mut newest = Newest::new();
    for (number, one) in followed.iter().enumerate() {
        let is_held = groups.contains(&one.group) && reach.class(number) > Class::Cycle;
        let known = newest.get(&one.group).map(|&(since, _)| since);
        if is_held && known.is_none_or(|since| rank(since) < rank(one.since)) {
            newest.insert(one.group, (one.since, number));
        }
    }
    newest
}

/// Returns the bytes of these blocks that are new since the first image and that only cycles of CPython's objects hold.
pub(super) fn new_in_cycles(reach: &Reach, followed: &[Followed]) -> u64 {
    let followed = followed.iter().enumerate();
    let new =
        followed.filter(|(number, one)| one.since > 0 && reach.class(*number) == Class::Cycle);
    new.map(|(_, one)| one.block.size).sum()
}

/// Returns the bytes in memory of all arenas but the main one that are in no chunk in use.
fn free_in_other_arenas(image: &Image, walk: &glibc::Walk) -> u64 {
    if walk.arenas.len() < 2 {
        return 0;
    }
    let usage = HeapUsage::of(image, walk);
    let arenas = walk.arenas.iter().zip(&usage.arenas);
    let free = arenas.filter(|(arena, _)| !arena.main).map(|(_, usage)| {
        let in_use = usage.of(State::InUse).resident;
        usage.total.resident.saturating_sub(in_use)
    });
    free.sum()
}

/// Returns the blocks that nothing refers to. Returns None, and prints why, if there are some, and the process has
/// memory that was not examined and may refer to them.
pub(super) fn lost(look: &HeapSnapshot, reach: &Reach) -> Option<HashSet<BlockId>> {
    let lost = verdict::lost_blocks(&look.heap, reach);
    if !lost.is_empty()
        && let Err(unknown) = verdict::expect_readable(&look.image)
    {
        memtools::message!("{unknown:#}");
        return None;
    }
    Some(lost)
}
