//! What the copy of a process needs of x86-64: stores that bypass the caches (non-temporal), and system calls without
//! errno.

use std::arch::asm;
use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

const WORD: usize = size_of::<__m128i>();
/// Size of a cache line, which goes to memory at once, in bytes.
pub(super) const LINE: usize = 64;

/// Copies bytes as `to.copy_from_slice(from)` does, but around the caches, for bytes that are not read soon. The
/// destination is not read from memory before, which saves a third of the memory traffic.
///
/// # Panics
/// If the slices have different lengths.
pub(super) fn copy_around_caches(to: &mut [u8], from: &[u8]) {
    assert_eq!(to.len(), from.len());
    let head = to.as_ptr().align_offset(LINE).min(to.len());
    let (to_head, to) = to.split_at_mut(head);
    let (from_head, from) = from.split_at(head);
    to_head.copy_from_slice(from_head);
    let mut to = to.chunks_exact_mut(LINE);
    let mut from = from.chunks_exact(LINE);
    for (to, from) in to.by_ref().zip(from.by_ref()) {
        for at in (0..LINE).step_by(WORD) {
            // SAFETY: both have LINE bytes, and `to` begins at a multiple of them. All x86-64 has SSE2.
            unsafe {
                let word = _mm_loadu_si128(from.as_ptr().add(at).cast());
                _mm_stream_si128(to.as_mut_ptr().add(at).cast(), word);
            }
        }
    }
    // SAFETY: the instruction has no operand. Other threads see the stores once they know that this function has
    // returned.
    unsafe { _mm_sfence() };
    to.into_remainder().copy_from_slice(from.remainder());
}

/// Makes a system call. Returns its result, or a negative error number. Unlike libc's functions, this one leaves errno
/// alone, which belongs to a thread.
///
/// # Safety
/// The arguments must be valid for the system call, which must do nothing that Rust forbids.
pub(super) unsafe fn system_call(number: libc::c_long, arguments: [usize; 6]) -> isize {
    let [first, second, third, fourth, fifth, sixth] = arguments;
    let result: isize;
    // SAFETY: these are the registers of a system call, and the kernel changes RAX, RCX and R11 only. The caller has
    // to see to what the call does.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => result,
            in("rdi") first,
            in("rsi") second,
            in("rdx") third,
            in("r10") fourth,
            in("r8") fifth,
            in("r9") sixth,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result
}
