//! How a call of a probed function is read from its registers.

use memtools::code::probe_place::ProbePlace;

use super::bpf::types::{function_kind as FunctionKind, signature_shift as Shift};

/// Arguments are numbered from 1, as the processor's calling convention has them; 0 is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Signature {
    /// What the function does.
    kind: FunctionKind,
    /// The argument that has the bytes wanted, or the bytes of each of `count`.
    size: u8,
    count: u8,
    /// The block that it frees, resizes or unmaps.
    address: u8,
    /// Where it stores the new block's address; it returns an errno then.
    result: u8,
    /// Whether it may free by calling another probed function.
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

    /// `void *f(..., size_t size, ...)`, as malloc.
    pub(crate) const fn allocate(size: u8) -> Self {
        Self {
            size,
            ..Self::new(FunctionKind::FUNCTION_ALLOCATE)
        }
    }

    /// `void f(..., void *block, ...)`, as free.
    pub(crate) const fn free(address: u8) -> Self {
        Self {
            address,
            ..Self::new(FunctionKind::FUNCTION_FREE)
        }
    }

    /// mmap(2) and its like, by what the kind says.
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

    /// The size is that of each of so many, as calloc's.
    pub(crate) const fn times(self, count: u8) -> Self {
        Self { count, ..self }
    }

    /// The function resizes or replaces the block in this argument, as realloc.
    pub(crate) const fn replacing(self, address: u8) -> Self {
        Self { address, ..self }
    }

    /// The function stores the new block where this argument points to, as posix_memalign.
    pub(crate) const fn storing(self, result: u8) -> Self {
        Self { result, ..self }
    }

    /// This signature with one more argument before the others.
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

    /// The function may free by calling another one that is probed as well.
    pub(crate) const fn wrapping(self) -> Self {
        Self {
            wraps: true,
            ..self
        }
    }

    /// Whether its return is of interest.
    pub(crate) fn returns(self) -> bool {
        self.kind != FunctionKind::FUNCTION_FREE
    }

    /// Whether it makes blocks.
    pub(crate) fn allocates(self) -> bool {
        self.kind == FunctionKind::FUNCTION_ALLOCATE
    }

    /// Whether it ends blocks or mappings, and makes none.
    pub(crate) fn only_ends(self) -> bool {
        self.frees() || self.kind == FunctionKind::FUNCTION_UNMAP
    }

    /// Whether it ends blocks.
    pub(crate) fn frees(self) -> bool {
        self.kind == FunctionKind::FUNCTION_FREE
    }

    /// The signature of a function that calls this one, by which of its own arguments each of this
    /// one's is. None if one of them is something else.
    pub(crate) fn given(self, by: impl Fn(u8) -> Option<u8>) -> Option<Self> {
        let argument = |number: u8| if number == 0 { Some(0) } else { by(number) };
        Some(Self {
            size: argument(self.size)?,
            count: argument(self.count)?,
            address: argument(self.address)?,
            result: argument(self.result)?,
            ..self
        })
    }

    /// The numbers of the arguments that its handler reads.
    pub(crate) fn arguments(self) -> Vec<u8> {
        // The kernel half knows where mmap and its like have the rest.
        let rest: &[u8] = match self.kind {
            FunctionKind::FUNCTION_MAP => &[4],
            FunctionKind::FUNCTION_UNMAP => &[2],
            FunctionKind::FUNCTION_REMAP => &[2, 4],
            _ => &[],
        };
        let fields = [self.size, self.count, self.address, self.result];
        let named = fields.into_iter().filter(|&argument| argument != 0);
        named.chain(rest.iter().copied()).collect()
    }

    /// How it is read at a place in the function where arguments may be in other registers. None
    /// if it cannot be read there.
    pub(crate) fn at(self, place: ProbePlace) -> Option<Self> {
        let moved = Self {
            size: place.register_of(self.size),
            count: place.register_of(self.count),
            address: place.register_of(self.address),
            result: place.register_of(self.result),
            ..self
        };
        let is_mapping = !matches!(
            self.kind,
            FunctionKind::FUNCTION_ALLOCATE | FunctionKind::FUNCTION_FREE
        );
        (moved == self || !is_mapping).then_some(moved)
    }

    /// The signature as `bpf/memleak.bpf.c` reads it.
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
        assert_eq!(Signature::free(1).wrapping().packed(), 0x101001);
    }
}
