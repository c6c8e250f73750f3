//! Detection of threads that may be in the middle of filling or flushing a cache. The caches of such a thread can be
//! misleading: a flushed block is free, and maybe another thread's, before it is out of the cache, and a block that
//! fills the cache is out of its slab before it is in the cache.

use std::ops::Range;

use crate::heap::arch::{self, ARGUMENT, SYSTEM_CALL};
use crate::heap::image::{Image, Thread};

/// Bytes of a stack in which the frames of jemalloc's functions are, with lists of flushed blocks.
const FRAMES: u64 = 16 << 10;
/// Bytes next to a thread pointer that hold the thread's own data.
const TLS_BYTES: u64 = 64 << 10;

/// Check for threads that are inside of jemalloc.
pub(super) struct AllocatorCheck<'a> {
    image: &'a Image,
    /// Code of the file that contains jemalloc.
    code: Vec<Range<u64>>,
    /// Memory that holds jemalloc's locks: its own memory, and the file's data.
    locks: Vec<Range<u64>>,
}

impl<'a> AllocatorCheck<'a> {
    /// Makes the check for the file that contains jemalloc. `locks` is the memory that holds its locks.
    pub(super) fn of(image: &'a Image, file: &[u8], locks: Vec<Range<u64>>) -> Self {
        let areas = image.areas.iter();
        let code = areas.filter(|area| area.mapping.executable && area.name() == file);
        Self {
            image,
            code: code.map(|area| area.mapping.range.clone()).collect(),
            locks,
        }
    }

    /// Returns the thread whose own memory contains an address.
    pub(super) fn thread_of(&self, address: u64) -> Option<&'a Thread> {
        let threads = self.image.threads.iter();
        let near = threads.filter(|thread| own_memory(thread).contains(&address));
        near.min_by_key(|thread| thread.thread_pointer.abs_diff(address))
    }

    /// Whether the thread may be in the middle of a function of jemalloc. A thread that waits in the kernel counts
    /// only if it waits where jemalloc itself would wait.
    pub(super) fn is_inside(&self, thread: &Thread) -> bool {
        let call = thread
            .general
            .get(SYSTEM_CALL)
            .map_or(-1, |&call| call as i64);
        let may_wait = match call {
            libc::SYS_madvise | libc::SYS_mmap | libc::SYS_munmap | libc::SYS_sched_yield => true,
            libc::SYS_futex => {
                let lock = thread.general.get(ARGUMENT).copied().unwrap_or(0);
                self.locks.iter().any(|range| range.contains(&lock))
            }
            call => call < 0,
        };
        may_wait && (self.is_code(thread.instruction) || self.has_frames(thread))
    }

    fn has_frames(&self, thread: &Thread) -> bool {
        let from = thread.stack_pointer & !7;
        let mut words = self.image.words(from..from.saturating_add(FRAMES));
        words.any(|(_, word)| self.is_code(word))
    }

    fn is_code(&self, address: u64) -> bool {
        self.code.iter().any(|code| code.contains(&address))
    }

    /// Iterates over the memory with the threads' own data.
    pub(super) fn own_memory(&self) -> impl Iterator<Item = Range<u64>> {
        self.image.threads.iter().map(own_memory)
    }
}

/// Returns the memory with the thread's own data.
fn own_memory(thread: &Thread) -> Range<u64> {
    arch::thread_locals(thread.thread_pointer, TLS_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::image::GENERAL_REGISTERS;
    use crate::heap::image::made::ImageBuilder;

    const FILE: &str = "/lib/libjemalloc.so.2";
    const CODE: u64 = 0x7f00_0000_0000;
    const DATA: u64 = CODE + 0x10_0000;
    const STACK: u64 = 0x7e00_0000_0000;
    /// Code of another file.
    const OTHER: u64 = CODE + 0x20_0000;

    /// Makes an image with a word on a stack.
    fn image(at: u64, word: u64) -> Image {
        let mut made = ImageBuilder::default();
        let file = |access: &str, name: &str| format!("{access} 00000000 fe:00 7 {name}");
        made.map(STACK..STACK + 0x10_0000, "rw-p 00000000 00:00 0 ");
        made.map(CODE..CODE + 0x1000, &file("r-xp", FILE));
        made.map(CODE + 0x5000..CODE + 0x6000, &file("r-xp", FILE));
        made.map(DATA..DATA + 0x1000, &file("rw-p", FILE));
        made.map(OTHER..OTHER + 0x1000, &file("r-xp", "/lib/libc.so.6"));
        for page in (STACK..STACK + 0x6000).step_by(0x1000) {
            made.put(page, 0);
        }
        made.put(at, word);
        made.image()
    }

    /// Makes a thread that runs, and is in no system call.
    fn running(instruction: u64) -> Thread {
        Thread {
            instruction,
            stack_pointer: STACK + 3,
            general: vec![u64::MAX; GENERAL_REGISTERS.len()],
            ..Thread::default()
        }
    }

    /// Makes a thread that waits in a system call with this argument.
    fn waiting(call: i64, argument: u64) -> Thread {
        let mut thread = running(OTHER);
        thread.general[SYSTEM_CALL] = call as u64;
        thread.general[ARGUMENT] = argument;
        thread
    }

    fn is_inside(image: &Image, thread: &Thread) -> bool {
        let lock = DATA..DATA + 0x1000;
        AllocatorCheck::of(image, FILE.as_bytes(), Vec::from([lock])).is_inside(thread)
    }

    #[test]
    fn a_thread_is_inside_by_its_next_instruction() {
        let image = image(STACK, 0);
        for instruction in [CODE, CODE + 0xfff, CODE + 0x5800] {
            assert!(is_inside(&image, &running(instruction)), "{instruction:#x}");
        }
        for instruction in [CODE - 1, CODE + 0x1000, DATA, OTHER, 0] {
            assert!(
                !is_inside(&image, &running(instruction)),
                "{instruction:#x}"
            );
        }
    }

    #[test]
    fn a_thread_is_inside_by_an_address_on_its_stack() {
        for (at, word, expected) in [
            (STACK, CODE + 5, true),
            (STACK + FRAMES - 8, CODE + 0x5fff, true),
            (STACK + FRAMES, CODE + 5, false),
            (STACK + 8, DATA, false),
            (STACK + 8, OTHER, false),
        ] {
            let found = is_inside(&image(at, word), &running(OTHER));
            assert_eq!(found, expected, "{at:#x}: {word:#x}");
        }
        // Functions from which a thread has returned are below its stack pointer.
        let mut thread = running(OTHER);
        thread.stack_pointer = STACK + 0x1000;
        assert!(!is_inside(&image(STACK + 0xff8, CODE), &thread));
        // A stack that was not copied has no frames.
        thread.stack_pointer = u64::MAX - 8;
        assert!(!is_inside(&image(STACK, CODE), &thread));
    }

    #[test]
    fn a_thread_that_waits_is_inside_only_where_jemalloc_waits() {
        let called = image(STACK + 64, CODE + 5);
        let waits = |call, argument| is_inside(&called, &waiting(call, argument));
        for call in [
            libc::SYS_madvise,
            libc::SYS_mmap,
            libc::SYS_munmap,
            libc::SYS_sched_yield,
        ] {
            assert!(waits(call, 0), "{call}");
        }
        for call in [libc::SYS_read, libc::SYS_epoll_pwait, libc::SYS_nanosleep] {
            assert!(!waits(call, DATA), "{call}");
        }
        // A lock of jemalloc's own, and one of the program's.
        assert!(waits(libc::SYS_futex, DATA + 0x40));
        assert!(!waits(libc::SYS_futex, DATA + 0x1000));
        assert!(!waits(libc::SYS_futex, STACK));
        // The thread may wait, but no function of jemalloc is on its stack.
        assert!(!is_inside(&image(STACK, 0), &waiting(libc::SYS_madvise, 0)));
        // Without registers, nothing shows that the thread waits.
        let mut bare = running(OTHER);
        bare.general.clear();
        assert!(is_inside(&called, &bare));
    }

    #[test]
    fn a_thread_has_what_is_just_below_its_pointer() {
        let mut image = image(STACK, 0);
        let pointers = [0x10_0000, 0x10_8000, 0x20_0000];
        for (tid, thread_pointer) in (1..).zip(pointers) {
            image.threads.push(Thread {
                tid,
                thread_pointer,
                ..Thread::default()
            });
        }
        let inside = AllocatorCheck::of(&image, FILE.as_bytes(), Vec::new());
        let tid = |address| inside.thread_of(address).map(|thread| thread.tid);
        for (address, expected) in [
            (0x10_0000 - 1, Some(1)),
            (0x10_0000 - TLS_BYTES, Some(1)),
            (0x10_0000 - TLS_BYTES - 1, None),
            (0x10_0000, Some(2)),
            (0x10_8000, None),
            (0x1f_fff8, Some(3)),
        ] {
            assert_eq!(tid(address), expected, "{address:#x}");
        }
        let own: Vec<_> = inside.own_memory().collect();
        assert_eq!(own, pointers.map(|pointer| pointer - TLS_BYTES..pointer));
    }
}
