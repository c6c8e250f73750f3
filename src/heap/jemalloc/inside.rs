//! Threads that may be in the middle of filling or flushing a cache, and whose caches may not be as they seem then:
//! what is flushed is free, and maybe another's, before it is out of the cache; what fills it is out of its slab before
//! it is in.

use std::ops::Range;

use crate::heap::image::{Image, Thread};

/// Bytes of a stack in which functions of jemalloc have their frames, with lists of what is flushed.
const FRAMES: u64 = 16 << 10;
/// Bytes below a thread's pointer in which it has what is its own.
const OWN: u64 = 64 << 10;
/// Where in the general registers the first argument of a system call is, and its number.
const ARGUMENT: usize = 14;
const CALL: usize = 15;

/// What tells whether a thread is inside of jemalloc.
pub(super) struct Inside<'a> {
    image: &'a Image,
    /// The code of the file that jemalloc is in.
    code: Vec<Range<u64>>,
    /// Where jemalloc has locks: in its own memory, and in the file's data.
    locks: Vec<Range<u64>>,
}

impl<'a> Inside<'a> {
    /// With the file that jemalloc is in, and where its locks are.
    pub(super) fn of(image: &'a Image, file: &[u8], locks: Vec<Range<u64>>) -> Self {
        let areas = image.areas.iter();
        let code = areas.filter(|area| area.mapping.executable && area.name() == file);
        Self {
            image,
            code: code.map(|area| area.mapping.range.clone()).collect(),
            locks,
        }
    }

    /// The thread that has this in its own memory.
    pub(super) fn thread_of(&self, address: u64) -> Option<&'a Thread> {
        let threads = self.image.threads.iter();
        let near = threads.filter(|thread| {
            let below = thread.thread_pointer.wrapping_sub(address);
            below <= OWN
        });
        near.min_by_key(|thread| thread.thread_pointer)
    }

    /// Whether the thread may be in the middle of something. One that waits in the kernel is so only where jemalloc
    /// itself would wait.
    pub(super) fn is_inside(&self, thread: &Thread) -> bool {
        let call = thread.general.get(CALL).map_or(-1, |&call| call as i64);
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

    /// What threads have of their own.
    pub(super) fn own_memory(&self) -> impl Iterator<Item = Range<u64>> {
        let threads = self.image.threads.iter();
        threads.map(|thread| thread.thread_pointer.saturating_sub(OWN)..thread.thread_pointer)
    }
}
