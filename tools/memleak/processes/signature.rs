//! Signature of a probed function: how a call is read from the registers.

use memtools::code::probe_point::ProbePoint;
use memtools::code::pymalloc::{SlotOp, SlotProbe};

use super::bpf::types::{function_kind as FunctionKind, signature_shift as Shift};

/// Signature of a function. Arguments are numbered from 1, as the processor's calling convention has them. 0 is no
/// argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Signature {
    /// Kind of the function, which says what it does.
    kind: FunctionKind,
    /// Argument that has the requested bytes, or the bytes of each of `count`.
    size: u8,
    count: u8,
    /// Argument that has the block to free, resize or unmap.
    address: u8,
    /// Argument that points to where the function stores the new block's address. Such a function returns an errno.
    result: u8,
    /// Whether the function may free by calling another probed function.
    wraps: bool,
}

impl Signature {
    const fn new(kind: FunctionKind) -> Self {
        Self {
            kind,
            size: 0,
            count: 0,
            address: 0,
            result: 0,
            wraps: false,
        }
    }

    /// Makes the signature of a function such as malloc: `void *f(..., size_t size, ...)`.
    pub(crate) const fn allocate(size: u8) -> Self {
        Self {
            size,
            ..Self::new(FunctionKind::FUNCTION_ALLOCATE)
        }
    }

    /// Makes the signature of a function such as free: `void f(..., void *block, ...)`.
    pub(crate) const fn free(address: u8) -> Self {
        Self {
            address,
            ..Self::new(FunctionKind::FUNCTION_FREE)
        }
    }

    /// Makes the signature of mmap(2). The BPF program knows its other arguments by the kind.
    pub(crate) const fn map() -> Self {
        Self {
            size: 2,
            ..Self::new(FunctionKind::FUNCTION_MAP)
        }
    }

    pub(crate) const fn unmap() -> Self {
        Self {
            address: 1,
            ..Self::new(FunctionKind::FUNCTION_UNMAP)
        }
    }

    pub(crate) const fn remap() -> Self {
        Self {
            address: 1,
            size: 3,
            ..Self::new(FunctionKind::FUNCTION_REMAP)
        }
    }

    /// Returns the signature of CPython's function that makes a pool and returns the pool's first slot.
    pub(crate) const fn new_pool() -> Self {
        Self::new(FunctionKind::FUNCTION_NEW_POOL)
    }

    /// Returns the signature of a copy of CPython's allocator. The fields have registers by their numbers.
    pub(crate) fn of_slot(place: &SlotProbe) -> Self {
        let kind = match place.moves {
            SlotOp::Alloc => FunctionKind::FUNCTION_TAKE_SLOT,
            SlotOp::Free => FunctionKind::FUNCTION_GIVE_BACK_SLOT,
        };
        Self {
            address: place.pool,
            result: place.slot.unwrap_or(0),
            wraps: place.slot.is_some(),
            ..Self::new(kind)
        }
    }

    /// Whether the place belongs to CPython's pools.
    pub(crate) fn is_of_pool(self) -> bool {
        self.is_of_slot() || self.kind == FunctionKind::FUNCTION_NEW_POOL
    }

    /// Adds the argument that has the number of items of this size, as calloc's.
    pub(crate) const fn times(self, count: u8) -> Self {
        Self { count, ..self }
    }

    /// Adds the argument that has the block to resize or replace, as realloc's.
    pub(crate) const fn replacing(self, address: u8) -> Self {
        Self { address, ..self }
    }

    /// Adds the argument that points to where the function stores the new block, as posix_memalign's.
    pub(crate) const fn storing(self, result: u8) -> Self {
        Self { result, ..self }
    }

    /// Returns this signature with one more argument before the others.
    pub(crate) fn one_further(self) -> Self {
        let further = |argument: u8| if argument == 0 { 0 } else { argument + 1 };
        Self {
            size: further(self.size),
            count: further(self.count),
            address: further(self.address),
            result: further(self.result),
            ..self
        }
    }

    /// Marks that the function may free by calling another one that is probed as well.
    pub(crate) const fn as_wrapper(self) -> Self {
        Self {
            wraps: true,
            ..self
        }
    }

    /// Whether the function's return is probed.
    pub(crate) fn needs_return_probe(self) -> bool {
        !self.frees() && !self.is_of_slot()
    }

    /// Whether the place is a copy of CPython's allocator, in the middle of a function.
    pub(crate) fn is_of_slot(self) -> bool {
        matches!(
            self.kind,
            FunctionKind::FUNCTION_TAKE_SLOT | FunctionKind::FUNCTION_GIVE_BACK_SLOT
        )
    }

    /// Whether the function allocates blocks.
    pub(crate) fn allocates(self) -> bool {
        self.kind == FunctionKind::FUNCTION_ALLOCATE
    }

    /// Whether the function frees blocks or unmaps memory, and does nothing else.
    pub(crate) fn only_ends(self) -> bool {
        self.frees()
            || matches!(
                self.kind,
                FunctionKind::FUNCTION_UNMAP | FunctionKind::FUNCTION_GIVE_BACK_SLOT
            )
    }

    /// Whether the function frees blocks.
    pub(crate) fn frees(self) -> bool {
        self.kind == FunctionKind::FUNCTION_FREE
    }

    /// Returns the signature of a function that calls this one. `by` returns the number of the caller's argument that
    /// is passed as an argument of this function. Returns None if one of the arguments is something else.
    pub(crate) fn with_arguments_from(self, by: impl Fn(u8) -> Option<u8>) -> Option<Self> {
        let argument = |number: u8| if number == 0 { Some(0) } else { by(number) };
        Some(Self {
            size: argument(self.size)?,
            count: argument(self.count)?,
            address: argument(self.address)?,
            result: argument(self.result)?,
            ..self
        })
    }

    /// Returns the numbers of the arguments that the function's BPF program reads.
    pub(crate) fn arguments(self) -> Vec<u8> {
        // The BPF program knows where mmap and its like have their other arguments.
        let rest: &[u8] = match self.kind {
            FunctionKind::FUNCTION_MAP => &[1, 4],
            FunctionKind::FUNCTION_UNMAP => &[2],
            FunctionKind::FUNCTION_REMAP => &[2, 4, 5],
            _ => &[],
        };
        let fields = [self.size, self.count, self.address, self.result];
        let named = fields.into_iter().filter(|&argument| argument != 0);
        named.chain(rest.iter().copied()).collect()
    }

    /// Returns the signature at a place in the function where arguments may be in other registers. Returns None if a
    /// call cannot be read there.
    pub(crate) fn at(self, place: ProbePoint) -> Option<Self> {
        let moved = Self {
            size: place.register_of(self.size),
            count: place.register_of(self.count),
            address: place.register_of(self.address),
            result: place.register_of(self.result),
            ..self
        };
        let is_mapping = matches!(
            self.kind,
            FunctionKind::FUNCTION_MAP
                | FunctionKind::FUNCTION_UNMAP
                | FunctionKind::FUNCTION_REMAP
        );
        (moved == self || !is_mapping).then_some(moved)
    }

    /// Returns the signature in the form that `bpf/memleak.bpf.c` reads.
    pub(crate) fn packed(self) -> u32 {
        let fields = [
            (Shift::SIGNATURE_KIND, self.kind.0),
            (Shift::SIGNATURE_SIZE, self.size.into()),
            (Shift::SIGNATURE_COUNT, self.count.into()),
            (Shift::SIGNATURE_ADDRESS, self.address.into()),
            (Shift::SIGNATURE_RESULT, self.result.into()),
            (Shift::SIGNATURE_WRAPS, self.wraps.into()),
        ];
        fields
            .into_iter()
            .fold(0, |packed, (shift, value)| packed | value << shift.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_field_has_four_bits() {
        assert_eq!(Signature::allocate(1).packed(), 0x10);
        assert_eq!(Signature::allocate(2).times(1).packed(), 0x120);
        assert_eq!(Signature::allocate(2).replacing(1).packed(), 0x1020);
        assert_eq!(Signature::allocate(3).storing(1).packed(), 0x10030);
        assert_eq!(Signature::free(1).as_wrapper().packed(), 0x101001);
    }
}
