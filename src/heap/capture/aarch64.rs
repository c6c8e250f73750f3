//! What the copy of a process needs of arm64: stores that bypass the caches (non-temporal), and system calls without
//! errno.

use std::arch::asm;

/// Bytes that are stored at once.
pub(super) const LINE: usize = 32;

/// Copies bytes as `to.copy_from_slice(from)` does, around the caches, as the bytes are not read soon.
///
/// # Panics
/// If the slices have different lengths.
pub(super) fn copy_around_caches(to: &mut [u8], from: &[u8]) {
    assert_eq!(to.len(), from.len());
    let mut to = to.chunks_exact_mut(LINE);
    let mut from = from.chunks_exact(LINE);
    for (to, from) in to.by_ref().zip(from.by_ref()) {
        // SAFETY: both have LINE bytes, and the instructions need no alignment.
        unsafe {
            asm!(
                "ldp {first:q}, {second:q}, [{from}]",
                "stnp {first:q}, {second:q}, [{to}]",
                first = out(vreg) _,
                second = out(vreg) _,
                from = in(reg) from.as_ptr(),
                to = in(reg) to.as_mut_ptr(),
                options(nostack),
            );
        }
    }
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
    // SAFETY: these are the registers of a system call, and the kernel changes x0 only. The caller has to see to what
    // the call does.
    unsafe {
        asm!(
            "svc #0",
            in("x8") number,
            inlateout("x0") first => result,
            in("x1") second,
            in("x2") third,
            in("x3") fourth,
            in("x4") fifth,
            in("x5") sixth,
            options(nostack),
        );
    }
    result
}
