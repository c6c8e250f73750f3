// SPDX-License-Identifier: BSD-2-Clause
//! A Rust program's own allocator, which never calls malloc. The allocator is a crate of its own, because the
//! compiler would otherwise inline it.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicUsize, Ordering};

const ROOM: usize = 16 << 20;

/// Allocator that hands out its memory from the start on, and takes nothing back.
struct Bump {
    room: UnsafeCell<[u8; ROOM]>,
    used: AtomicUsize,
}

// SAFETY: no two blocks overlap.
unsafe impl Sync for Bump {}

// SAFETY: blocks are aligned, within the space, and given away once.
unsafe impl GlobalAlloc for Bump {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let taken = layout.size() + layout.align();
        let start = self.used.fetch_add(taken, Ordering::Relaxed);
        if start + taken > ROOM {
            return std::ptr::null_mut();
        }
        let address = self.room.get() as usize + start;
        address.next_multiple_of(layout.align()) as *mut u8
    }

    unsafe fn dealloc(&self, _block: *mut u8, _layout: Layout) {}
}

#[global_allocator]
static BUMP: Bump = Bump { room: UnsafeCell::new([0; ROOM]), used: AtomicUsize::new(0) };
