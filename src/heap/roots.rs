//! Where a program's references begin: the words outside of its blocks that it can still read.
//!
//! Roots are the registers, vectors included, of every thread, and all memory that was copied except
//! what nobody reads any more, or what only an allocator does. Whatever is wrongly taken for a root hides a
//! lost block, whatever is wrongly left out invents one: in doubt, memory is a root.

use std::ops::Range;

use crate::heap::blocks::Heap;
use crate::heap::image::{Image, Thread};
use crate::heap::page_table::PAGE;

/// Bytes below the stack pointer that a function may use (the System V ABI's red zone).
const RED_ZONE: u64 = 128;
/// Where at most glibc keeps a thread's control block, below the end of its stack.
const CONTROL_BLOCK_WITHIN: u64 = 16 << 10;
/// Bytes of the control block that stay in use when its thread has ended: the pointer to its table of
/// thread-local storage is among them, and the table is used again by the next thread.
const KEPT_OF_CONTROL_BLOCK: u64 = 64;
/// Bytes of glibc's `struct pthread`, of which the control block is the beginning, rounded up.
const PTHREAD_BYTES: u64 = 0x900;
/// How far below a thread's control block its static thread-local storage is looked for, to name it.
const TLS_WITHIN: u64 = 4096;

/// A word outside of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Root {
    /// In memory, at this address.
    Memory(u64),
    /// In a register of the thread with this place in [`Image::threads`].
    Register(u32, &'static str),
}

/// What a root is, for a reader. Paths are as in /proc/PID/maps: not escaped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A register of a thread.
    Register {
        /// The thread.
        tid: u32,
        /// The register, or `vector`.
        name: &'static str,
    },
    /// A thread's stack.
    Stack {
        /// The thread.
        tid: u32,
        /// Bytes above the stack pointer.
        offset: i64,
    },
    /// A thread's own storage, or its control block.
    ThreadLocal {
        /// The thread.
        tid: u32,
        /// Bytes from the thread pointer, mostly below.
        offset: i64,
    },
    /// The data of a program or library, those without a file (bss) included.
    Module {
        /// The file.
        path: Vec<u8>,
        /// The address less that at which the file's first byte is mapped.
        offset: u64,
    },
    /// Other memory: the start of its mapping, how far in, and its name, if it has one.
    Other {
        /// Where the mapping starts.
        start: u64,
        /// Bytes from there.
        offset: u64,
        /// A name such as `[anon:x]` or `/dev/shm/x`; mostly empty.
        name: Vec<u8>,
    },
}

impl Place {
    /// How well a place says who holds what it refers to, the best first: of two chains of the same length the
    /// one from the better place is told.
    pub fn rank(&self) -> u8 {
        match self {
            Self::Module { .. } => 0,
            Self::ThreadLocal { .. } => 1,
            Self::Other { .. } => 2,
            Self::Stack { .. } => 3,
            Self::Register { .. } => 4,
        }
    }
}

/// All memory whose words are no roots, in order and apart: the allocators' memory, blocks included, what is
/// below a thread's stack pointer, and stacks of threads that have ended.
pub fn not_roots(image: &Image, heap: &Heap) -> Vec<Range<u64>> {
    let blocks = heap.blocks().iter().map(|block| block.range());
    let own = heap.regions.iter().chain(&heap.structures).cloned();
    let mut ranges: Vec<_> = own.chain(blocks).collect();
    ranges.extend(
        image
            .threads
            .iter()
            .filter_map(|thread| below_stack(image, thread)),
    );
    ranges.extend(ended_stacks(image));
    ranges.retain(|range| !range.is_empty());
    ranges.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match merged.last_mut().filter(|last| range.start <= last.end) {
            Some(last) => last.end = last.end.max(range.end),
            None => merged.push(range),
        }
    }
    merged.shrink_to_fit();
    merged
}

/// The part of a thread's stack that it has returned from. A stack pointer in memory that may hold other stacks, too,
/// such as those of coroutines, says nothing of what is below: only stacks that the kernel or glibc has made count.
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

/// Whether memory that nobody may touch ends here.
fn has_guard(image: &Image, address: u64) -> bool {
    let before = address.checked_sub(1).and_then(|last| image.area(last));
    before.is_some_and(|guard| !guard.readable && !guard.writable && guard.is_private_memory())
}

/// Stacks that glibc keeps, mapped, for threads to come. Their words, the thread-specific ones included,
/// are those of a thread that has ended. In each there is still its control block, which begins with its own
/// address and has that again 16 bytes on.
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
            || !area.is_private_memory()
            || !has_guard(image, range.start)
            || is_used()
        {
            continue;
        }
        let last = range
            .end
            .saturating_sub(CONTROL_BLOCK_WITHIN)
            .max(range.start)..range.end;
        let control = image
            .words(last)
            .find(|&(address, word)| address == word && image.word(address + 16) == Some(address));
        if let Some((control, _)) = control {
            let end = (control + PTHREAD_BYTES).next_multiple_of(PAGE);
            ended.push(range.start..control);
            ended.push(control + KEPT_OF_CONTROL_BLOCK..end.min(range.end));
        }
    }
    ended
}

/// What a root is.
pub fn place(image: &Image, root: Root) -> Place {
    let address = match root {
        Root::Memory(address) => address,
        Root::Register(thread, name) => {
            let tid = image
                .threads
                .get(thread as usize)
                .map_or(0, |thread| thread.tid);
            return Place::Register { tid, name };
        }
    };
    place_of_thread(image, address).unwrap_or_else(|| place_of_area(image, address))
}

fn place_of_thread(image: &Image, address: u64) -> Option<Place> {
    let area = image.area(address)?;
    let range = &area.mapping.range;
    let from = |base: u64| address.wrapping_sub(base).cast_signed();
    for thread in &image.threads {
        let (pointer, tid) = (thread.thread_pointer, thread.tid);
        let own = pointer.saturating_sub(TLS_WITHIN)..pointer.saturating_add(PTHREAD_BYTES);
        if pointer != 0 && own.contains(&address) && area.is_private_memory() {
            let offset = from(pointer);
            return Some(Place::ThreadLocal { tid, offset });
        }
        let stack = thread.stack_pointer.saturating_sub(RED_ZONE);
        if range.contains(&thread.stack_pointer) && address >= stack {
            let offset = from(thread.stack_pointer);
            return Some(Place::Stack { tid, offset });
        }
    }
    None
}

fn place_of_area(image: &Image, address: u64) -> Place {
    let at = image
        .areas
        .partition_point(|area| area.mapping.range.end <= address);
    let area = image
        .areas
        .get(at)
        .filter(|area| area.mapping.range.contains(&address));
    let Some(area) = area else {
        return Place::Other {
            start: address,
            offset: 0,
            name: Vec::new(),
        };
    };
    // What a file has no bytes for, its bss, is mapped behind it, and touches it.
    let mut file = (area.has_file() && !area.shared).then_some(at);
    if area.is_private_memory() && area.name().is_empty() && at > 0 {
        let before = &image.areas[at - 1];
        let touches = before.mapping.range.end == area.mapping.range.start;
        file = (touches && before.has_file() && !before.shared).then_some(at - 1);
    }
    let first = file.and_then(|file| {
        let name = image.areas[file].name();
        let same = image.areas[..=file].iter().rev();
        let near = same.take_while(|area| area.name() == name || area.name().is_empty());
        near.filter(|area| area.name() == name).last()
    });
    match first {
        Some(first) => Place::Module {
            path: first.name().to_vec(),
            offset: address - first.mapping.range.start,
        },
        None => Place::Other {
            start: area.mapping.range.start,
            offset: address - area.mapping.range.start,
            name: area.name().to_vec(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::blocks::{Block, Coverage};
    use crate::heap::image::made::Made;

    const STACK: u64 = 0x7f00_0000_1000;
    const STACK_END: u64 = STACK + 0x2_0000;
    const CONTROL: u64 = STACK_END - 0x940;

    /// A thread's stack as glibc makes them, with its guard and control block.
    fn with_stack() -> Made {
        let mut made = Made::default();
        made.map(STACK - 0x1000..STACK, "---p 00000000 00:00 0 ");
        made.map(STACK..STACK_END, "rw-p 00000000 00:00 0 ");
        made.put(CONTROL, CONTROL);
        made.put(CONTROL + 16, CONTROL);
        made
    }

    fn thread(stack_pointer: u64) -> Thread {
        let mut general = vec![0; 27];
        (general[19], general[21]) = (stack_pointer, CONTROL);
        Thread::new(7, Vec::new(), general, Vec::new())
    }

    fn skipped(made: &Made) -> Vec<Range<u64>> {
        not_roots(&made.image(), &Heap::new(Vec::new(), Coverage::Complete))
    }

    #[test]
    fn what_a_thread_has_returned_from_is_no_root() {
        let mut made = with_stack();
        made.threads = vec![thread(CONTROL - 0x1000)];
        let below = STACK..CONTROL - 0x1000 - 128;
        assert_eq!(skipped(&made), [below]);
        // Another thread's stack is in the same mapping, or the stack was not made by glibc.
        made.threads.push(thread(CONTROL - 0x2000));
        made.threads[1].tid = 8;
        assert_eq!(skipped(&made), []);
        made.threads = vec![thread(CONTROL - 0x1000)];
        made.threads[0].thread_pointer = 0x1234;
        assert_eq!(skipped(&made), []);
    }

    #[test]
    fn of_an_ended_thread_only_the_pointer_to_its_table_stays() {
        let mut made = with_stack();
        assert_eq!(skipped(&made), [STACK..CONTROL, CONTROL + 64..STACK_END]);
        made.threads = vec![thread(STACK + 0x100)];
        let below = STACK..STACK + 0x80;
        assert_eq!(skipped(&made), [below]);
        // Memory with no guard before, and memory with none of glibc's marks, may be anything.
        made = with_stack();
        made.maps = made.maps.replace("---p", "rw-p");
        assert_eq!(skipped(&made), []);
        made = with_stack();
        made.put(CONTROL + 16, 0);
        assert_eq!(skipped(&made), []);
    }

    #[test]
    fn allocators_memory_is_no_root_and_ranges_are_joined() {
        let mut heap = Heap::new(
            vec![Block {
                address: 0x5000,
                size: 16,
            }],
            Coverage::Complete,
        );
        heap.regions = vec![0x1000..0x3000, 0x3000..0x4000];
        heap.structures.push(0x3800..0x4800);
        assert_eq!(
            not_roots(&Image::default(), &heap),
            [0x1000..0x4800, 0x5000..0x5010]
        );
    }

    #[test]
    fn places_have_names() {
        let mut made = with_stack();
        made.maps.clear();
        made.map(0x1000..0x2000, "r-xp 00000000 fe:00 9 /lib/libx.so");
        made.map(0x2000..0x3000, "rw-p 00001000 fe:00 9 /lib/libx.so");
        made.map(0x3000..0x4000, "rw-p 00000000 00:00 0 ");
        made.map(0x5000..0x6000, "rw-p 00000000 00:00 0 ");
        made.map(0x8000..0x9000, "rw-s 00000000 00:01 5 /dev/shm/x");
        made.map(STACK..STACK_END, "rw-p 00000000 00:00 0 ");
        made.threads = vec![thread(CONTROL - 0x1800)];
        let image = made.image();
        let of = |address| place(&image, Root::Memory(address));
        let module = |offset| Place::Module {
            path: b"/lib/libx.so".to_vec(),
            offset,
        };
        assert_eq!((of(0x2010), of(0x3010)), (module(0x1010), module(0x2010)));
        assert!(matches!(of(0x5008), Place::Other { offset: 8, .. }));
        assert!(matches!(of(0x8008), Place::Other { name, .. } if name == b"/dev/shm/x"));
        assert_eq!(
            of(CONTROL - 0x1800 + 24),
            Place::Stack { tid: 7, offset: 24 }
        );
        assert_eq!(
            of(CONTROL - 16),
            Place::ThreadLocal {
                tid: 7,
                offset: -16
            }
        );
        assert_eq!(
            place(&image, Root::Register(0, "r12")),
            Place::Register {
                tid: 7,
                name: "r12"
            }
        );
    }
}
