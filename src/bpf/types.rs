//! The structs that `bpf/include/*.bpf.h` share with user space, generated from their BTF.

use anyhow::{Result, anyhow};
use plain::Plain;

crate::generated!("shared");

pub use generated::types::{
    cgroup_path, filter, filter_table, histogram, hotspot_heap, hotspot_layout, hotspot_process,
    losses, python_chain, python_code, python_instruction, python_mark, python_process, room,
    room_of, stack, stack_count, stack_count_key, stack_end, stack_flags, stack_id, stack_layout,
    stack_slot, unwind_ask, unwind_file, unwind_frame_pointer, unwind_kind, unwind_layout,
    unwind_mode, unwind_request,
};

// SAFETY: plain integers, generated from the C struct; every bit pattern is valid.
unsafe impl Plain for filter {}
// SAFETY: as above.
unsafe impl Plain for cgroup_path {}
// SAFETY: as above.
unsafe impl Plain for hotspot_process {}
// SAFETY: as above.
unsafe impl Plain for losses {}
// SAFETY: as above.
unsafe impl Plain for python_code {}
// SAFETY: as above.
unsafe impl Plain for python_process {}
// SAFETY: as above.
unsafe impl Plain for stack {}
// SAFETY: as above.
unsafe impl Plain for stack_slot {}
// SAFETY: as above.
unsafe impl Plain for unwind_file {}
// SAFETY: as above.
unsafe impl Plain for unwind_request {}
// SAFETY: as above.
unsafe impl Plain for histogram {}
// SAFETY: as above.
unsafe impl Plain for stack_count {}
// SAFETY: as above.
unsafe impl Plain for stack_count_key {}

/// What stands for a number that the kernel half could not have; UNKNOWN of `memtools.bpf.h`.
pub const UNKNOWN: u64 = u64::MAX;

/// The number, if the kernel half could have it.
pub fn known(number: u64) -> Option<u64> {
    (number != UNKNOWN).then_some(number)
}

/// A map's value as the struct that it is.
///
/// # Errors
/// If the bytes are too few for it, which only a mismatch of program and binary can make.
pub fn view<T: Plain>(bytes: &[u8]) -> Result<&T> {
    plain::from_bytes(bytes)
        .map_err(|error| anyhow!("a map's value has another layout than expected: {error:?}"))
}

/// A copy of a struct in memory that the kernel half may be writing just then: part of one state and part of the
/// next, unless the struct says which it is.
pub fn read_while_written<T: Plain + Copy>(shared: &T) -> T {
    // SAFETY: a reference is valid and aligned, and any bytes are a T. The read is volatile, so that each is one.
    unsafe { std::ptr::from_ref(shared).read_volatile() }
}

/// A struct as the bytes of a map's key or value.
pub fn bytes_of<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: generated from a C struct whose padding, if any, is a field of its own.
    unsafe { plain::as_bytes(value) }
}
