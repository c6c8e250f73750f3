//! Roots of a program's references: the words outside of its blocks that the program can still read.
//!
//! Roots are the registers of every thread, vectors included, words that the kernel keeps, and all copied memory
//! except what is not read any more, or what only an allocator reads. Memory that is wrongly taken for a root hides
//! a lost block. Memory that is wrongly omitted invents a lost block. In doubt, memory is a root.

use std::collections::HashMap;
use std::ops::Range;

use crate::heap::arch::{self, RED_ZONE};
use crate::heap::blocks::{self, Heap};
use crate::heap::image::{Image, Thread};

/// Word outside of blocks that may refer to a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Root {
    /// Word in memory, at this address.
    Memory(u64),
    /// Register, with its name, of the thread with this index in [`Image::threads`].
    Register(u32, &'static str),
    /// Word in the kernel, with this index in [`Image::kernel_words`].
    Kernel(u32),
}

/// Description of a root for a reader. Paths are as in /proc/PID/maps: not escaped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RootPlace {
    /// A register of a thread.
    Register {
        /// ID of the thread.
        tid: u32,
        /// Name of the register, or `vector`.
        name: &'static str,
    },
    /// A thread's stack.
    Stack {
        /// ID of the thread.
        tid: u32,
        /// Bytes above the stack pointer.
        offset: i64,
    },
    /// A thread's thread-local storage, or its control block.
    ThreadLocal {
        /// ID of the thread.
        tid: u32,
        /// Bytes from the thread pointer, mostly negative.
        offset: i64,
    },
    /// The data of a program or library, including data without a file (bss).
    Module {
        /// Path of the file.
        path: Vec<u8>,
        /// Distance of the address from the one at which the file's first byte is mapped.
        offset: u64,
    },
    /// A word in the kernel.
    Kernel {
        /// Owner of the word: `sigev_value of timer`.
        what: &'static str,
        /// Number of the timer or of the file descriptor.
        number: u32,
    },
    /// Other memory: the start of its mapping, the offset in it, and its name, if it has one.
    Other {
        /// Address at which the mapping starts.
        start: u64,
        /// Offset in the mapping, in bytes.
        offset: u64,
        /// A name such as `[anon:x]` or `/dev/shm/x`; mostly empty.
        name: Vec<u8>,
    },
}

impl RootPlace {
    /// Rank of memory that is no variable. Stacks and registers have higher ranks.
    pub(super) const RANK_OF_OTHERS: u8 = 2;

    /// Returns how well a place says who holds a block, with the best place first. Of two chains of the same
    /// length, the one from the better place is reported.
    pub fn rank(&self) -> u8 {
        match self {
            Self::Module { .. } => 0,
            Self::ThreadLocal { .. } => 1,
            Self::Other { .. } | Self::Kernel { .. } => Self::RANK_OF_OTHERS,
            Self::Stack { .. } => 3,
            Self::Register { .. } => 4,
        }
    }
}

/// Returns all memory whose words are no roots, in order and disjoint: the allocators' memory, blocks included,
/// memory below a thread's stack pointer, and stacks of threads that have ended.
pub fn excluded_ranges(image: &Image, heap: &Heap) -> Vec<Range<u64>> {
    let blocks = heap.blocks().iter().map(|block| block.range());
    let own = heap.regions.iter().chain(&heap.structures).cloned();
    let mut ranges: Vec<_> = own.chain(blocks).collect();
    let threads = image.threads.iter();
    let mut below: Vec<_> = threads
        .filter_map(|thread| below_stack(image, thread))
        .collect();
    keep_coroutines(image, heap, &mut below);
    ranges.extend(below);
    ranges.extend(ended_stacks(image));
    ranges.retain(|range| !range.is_empty());
    blocks::merged(ranges)
}

/// Returns all addresses outside of `not_roots`, in order.
pub fn root_ranges(not_roots: &[Range<u64>]) -> impl Iterator<Item = Range<u64>> {
    let starts = [0].into_iter().chain(not_roots.iter().map(|skip| skip.end));
    let ends = not_roots.iter().map(|skip| skip.start).chain([u64::MAX]);
    starts.zip(ends).map(|(start, end)| start..end)
}

/// Returns the part of a thread's stack from which the thread has returned. Only stacks that the kernel or glibc has
/// made count: in memory that may hold other stacks, too, such as those of coroutines, a stack pointer says nothing
/// about the memory below.
fn below_stack(image: &Image, thread: &Thread) -> Option<Range<u64>> {
    let area = image.area(thread.stack_pointer)?;
    let range = &area.mapping.range;
    let is_made_by_libc = || {
        let others = image.threads.iter().filter(|other| other.tid != thread.tid);
        has_guard(image, range.start)
            && (thread.stack_pointer..range.end).contains(&thread.thread_pointer)
            && others
                .flat_map(|other| [other.stack_pointer, other.thread_pointer])
                .all(|address| !range.contains(&address))
    };
    (area.name() == b"[stack]" || is_made_by_libc())
        .then(|| range.start..(thread.stack_pointer.saturating_sub(RED_ZONE) & !7).max(range.start))
}

/// Keeps stacks of coroutines that are arrays on a thread's own stack, below the one that the thread executes. The saved
/// stack pointer of a coroutine is in the program's data or in a block: no memory of `below` from such a word's address
/// on is left out.
fn keep_coroutines(image: &Image, heap: &Heap, below: &mut [Range<u64>]) {
    let Some(lowest) = below.iter().map(|stack| stack.start).min() else {
        return;
    };
    let mut look = |range: Range<u64>| {
        for (_, word) in image.words(range) {
            if word < lowest || !word.is_multiple_of(8) {
                continue;
            }
            if let Some(stack) = below.iter_mut().find(|stack| stack.contains(&word)) {
                stack.end = word;
            }
        }
    };
    heap.blocks().iter().for_each(|block| look(block.range()));
    for area in image.areas.iter().filter(|area| area.writable) {
        let range = &area.mapping.range;
        if place_of_module(image, range.start).is_some() {
            look(range.clone());
        }
    }
}

/// Whether inaccessible memory (a guard) ends at this address.
fn has_guard(image: &Image, address: u64) -> bool {
    let before = address.checked_sub(1).and_then(|last| image.area(last));
    before.is_some_and(|guard| !guard.readable && !guard.writable && guard.is_private_anonymous())
}

/// Returns the stacks that glibc keeps, mapped, for later threads. Their words, the thread-specific ones included,
/// are those of a thread that has ended. Each still has its control block.
fn ended_stacks(image: &Image) -> Vec<Range<u64>> {
    let mut ended = Vec::new();
    for area in &image.areas {
        let range = &area.mapping.range;
        let is_used = || {
            let threads = image.threads.iter();
            threads
                .flat_map(|thread| [thread.stack_pointer, thread.thread_pointer])
                .any(|address| range.contains(&address))
        };
        if !area.writable
            || !area.name().is_empty()
            || !area.is_private_anonymous()
            || !has_guard(image, range.start)
            || is_used()
        {
            continue;
        }
        ended.extend(arch::unused_of_ended(image, range));
    }
    ended
}

/// Describes a root. Memory without a file that touches a file's mapping is taken for that file's bss:
/// [`ModuleSizes::place`] knows better.
pub fn place(image: &Image, root: Root) -> RootPlace {
    ModuleSizes::default().place(image, root)
}

/// Bytes of memory that files are loaded into, by their paths in the image
/// ([`elf::loaded_bytes`](crate::code::elf::loaded_bytes)).
#[derive(Debug, Clone, Default)]
pub struct ModuleSizes(pub HashMap<Vec<u8>, u64>);

impl ModuleSizes {
    /// Describes a root. Memory behind a module's bss is not the module's, even where the kernel has joined it with
    /// the bss in one mapping.
    pub fn place(&self, image: &Image, root: Root) -> RootPlace {
        let address = match root {
            Root::Memory(address) => address,
            Root::Register(thread, name) => {
                let thread = image.threads.get(thread as usize);
                let tid = thread.map_or(0, |thread| thread.tid);
                return RootPlace::Register { tid, name };
            }
            Root::Kernel(at) => {
                let kept = image.kernel_words.get(at as usize);
                let (what, number) = kept.map_or(("", 0), |kept| (kept.what, kept.number));
                return RootPlace::Kernel { what, number };
            }
        };
        let of_thread = || place_of_thread(image, address);
        let of_module = || place_of_module(image, address).filter(|place| self.has(place));
        of_thread()
            .or_else(of_module)
            .unwrap_or_else(|| place_of_area(image, address))
    }

    fn has(&self, place: &RootPlace) -> bool {
        let RootPlace::Module { path, offset } = place else {
            return false;
        };
        self.0.get(path).is_none_or(|bytes| offset < bytes)
    }
}

fn place_of_thread(image: &Image, address: u64) -> Option<RootPlace> {
    let area = image.area(address)?;
    let from = |base: u64| address.wrapping_sub(base).cast_signed();
    let of = |thread: &&Thread| {
        let own = arch::own_storage(image, thread);
        own.is_some_and(|own| own.contains(&address))
    };
    if let Some(thread) = image.threads.iter().find(of) {
        return Some(RootPlace::ThreadLocal {
            tid: thread.tid,
            offset: from(thread.thread_pointer),
        });
    }
    // If a mapping has several stacks, as of coroutines, the stack that begins closest below is taken.
    let red_zone = |thread: &Thread| thread.stack_pointer.saturating_sub(RED_ZONE);
    let stacks = image.threads.iter().filter(|thread| {
        area.mapping.range.contains(&thread.stack_pointer) && red_zone(thread) <= address
    });
    stacks
        .max_by_key(|thread| thread.stack_pointer)
        .map(|thread| RootPlace::Stack {
            tid: thread.tid,
            offset: from(thread.stack_pointer),
        })
}

/// Returns the place in a module's data, if a file is mapped at the address, or memory without a file that touches a
/// file's. Such memory is the file's bss, for which the file has no bytes, and which is mapped behind it.
fn place_of_module(image: &Image, address: u64) -> Option<RootPlace> {
    let areas = &image.areas;
    let at = areas.partition_point(|area| area.mapping.range.end <= address);
    let area = areas
        .get(at)
        .filter(|area| area.mapping.range.contains(&address))?;
    let file = if area.is_private_anonymous() && area.name().is_empty() {
        let before = at.checked_sub(1)?;
        let touches = areas[before].mapping.range.end == area.mapping.range.start;
        touches.then_some(before)?
    } else {
        at
    };
    if !areas[file].has_file() || areas[file].shared {
        return None;
    }
    let name = areas[file].name();
    let same = areas[..=file].iter().rev();
    let near = same.take_while(|area| area.name() == name || area.name().is_empty());
    let first = near.filter(|area| area.name() == name).last()?;
    Some(RootPlace::Module {
        path: name.to_vec(),
        offset: address - first.mapping.range.start,
    })
}

fn place_of_area(image: &Image, address: u64) -> RootPlace {
    let area = image.area(address);
    let start = area.map_or(address, |area| area.mapping.range.start);
    RootPlace::Other {
        start,
        offset: address - start,
        name: area.map_or(Vec::new(), |area| area.name().to_vec()),
    }
}

#[cfg(test)]
mod tests;
