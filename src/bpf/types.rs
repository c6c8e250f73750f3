//! The structs that `bpf/include/*.bpf.h` share with user space, generated from their BTF.

use anyhow::{Result, anyhow};
use plain::Plain;

use crate::print::histogram::Histogram;

crate::generated!("shared");

pub use generated::types::{
    cgroup_path, fill_level, filter, filter_table, histogram, hotspot_heap, hotspot_layout,
    hotspot_process, losses, python_chain, python_code, python_instruction, python_mark,
    python_process, stack, stack_count, stack_count_key, stack_end, stack_flags, stack_id,
    stack_layout, stack_slot, table_id, unwind_file, unwind_frame_pointer, unwind_kind,
    unwind_layout, unwind_mode, unwind_request, unwind_row_layout, unwind_subject,
};

// SAFETY: plain integers, generated from the C struct; every bit pattern is valid.
unsafe impl Plain for filter {}
// SAFETY: plain integers; every bit pattern is valid.
unsafe impl Plain for cgroup_path {}
// SAFETY: plain integers; every bit pattern is valid.
unsafe impl Plain for hotspot_process {}
// SAFETY: plain integers; every bit pattern is valid.
unsafe impl Plain for losses {}
// SAFETY: plain integers; every bit pattern is valid.
unsafe impl Plain for python_code {}
// SAFETY: plain integers; every bit pattern is valid.
unsafe impl Plain for python_process {}
// SAFETY: plain integers; every bit pattern is valid.
unsafe impl Plain for stack {}
// SAFETY: plain integers; every bit pattern is valid.
unsafe impl Plain for stack_slot {}
// SAFETY: plain integers; every bit pattern is valid.
unsafe impl Plain for unwind_file {}
// SAFETY: plain integers; every bit pattern is valid.
unsafe impl Plain for unwind_request {}
// SAFETY: plain integers; every bit pattern is valid.
unsafe impl Plain for histogram {}
// SAFETY: plain integers; every bit pattern is valid.
unsafe impl Plain for stack_count {}
// SAFETY: plain integers; every bit pattern is valid.
unsafe impl Plain for stack_count_key {}

impl From<&histogram> for Histogram {
    fn from(histogram: &histogram) -> Self {
        histogram.slots.into()
    }
}

/// Value of a number that a BPF program could not read; UNKNOWN of `memtools.bpf.h`.
pub const UNKNOWN: u64 = u64::MAX;

/// Returns the number; None if it is [`UNKNOWN`].
pub fn known(number: u64) -> Option<u64> {
    (number != UNKNOWN).then_some(number)
}

/// Views the bytes of a map's key or value as the struct that they hold.
///
/// # Errors
/// If there are too few bytes for the struct, which only a mismatch between BPF program and binary can cause.
pub fn view<T: Plain>(bytes: &[u8]) -> Result<&T> {
    plain::from_bytes(bytes)
        .map_err(|error| anyhow!("a map's value has another layout than expected: {error:?}"))
}

/// Copies a struct in memory that a BPF program may be writing at the same time. The copy can mix two states, and
/// only fields of the struct itself can tell that.
pub fn read_while_written<T: Plain + Copy>(shared: &T) -> T {
    // SAFETY: a reference is valid and aligned, and any bytes are a T. The read is volatile, so that every call reads
    // memory.
    unsafe { std::ptr::from_ref(shared).read_volatile() }
}

/// Views a struct as the bytes of a map's key or value.
pub fn bytes_of<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: generated from a C struct whose padding, if any, is a field of its own.
    unsafe { plain::as_bytes(value) }
}
