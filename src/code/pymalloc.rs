//! Instructions by which CPython's allocator of small objects, pymalloc, takes a slot of a pool and gives one back.
//!
//! Compilers that optimize by a profile copy pymalloc into some two hundred functions of the interpreter, so that
//! probes on its functions miss most objects. Each copy has to count the used slots in the header of the pool, though:
//!
//! ```c
//! struct pool_header {      /* Objects/obmalloc.c; the offsets are the same from CPython 3.7 to 3.15 */
//!     uint count;           /* 0: used slots */
//!     block *freeblock;     /* 8: the first free slot, which begins with the address of the next one */
//!     ...
//!     uint szidx;           /* 36: bytes of a slot / 16 - 1 */
//! };
//! block = pool->freeblock; pool->count++; pool->freeblock = *(block **)block;     /* takes a slot */
//! *(block **)block = pool->freeblock; pool->freeblock = block; pool->count--;     /* gives one back */
//! ```
//!
//! `freeblock` is the slot at the instruction that changes the count, in both directions, in each of the 4 to 300
//! copies in eleven interpreters that were examined (CPython 3.10 to 3.15 by GCC 11 to 15). A file with a copy in
//! another order is refused. The first slot of a pool is taken by a function of its own, `allocate_from_new_pool`,
//! which sets the count to 1 and is never copied. Pools of 4 KiB, as they were before 3.10, are refused.

use std::ops::Range;

pub use crate::code::arch::pymalloc::places;

/// Places of pymalloc in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pymalloc {
    /// Copies that take or give back a slot, ascending by offset.
    pub slots: Vec<SlotProbe>,
    /// Bytes in the file of the function that makes a pool and returns the pool's first slot.
    pub new_pool: Range<u64>,
}

/// Direction in which a copy of pymalloc moves a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SlotOp {
    /// The slot is allocated.
    Alloc,
    /// The slot is freed.
    Free,
}

/// Instruction that is executed once for each slot that a copy of pymalloc takes or gives back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotProbe {
    /// Offset of the instruction in the file.
    pub file_offset: u64,
    /// Direction of the copy.
    pub moves: SlotOp,
    /// Number of the register with the address of the pool's header, as in the encoding of instructions.
    pub pool: u8,
    /// Number of the register with the address of the slot; None where `freeblock` of the pool is the slot.
    pub slot: Option<u8>,
}
