//! Numbers in HotSpot's encoding (`UNSIGNED5`, after Pack200): all bytes but the last are among the 64 highest
//! values.

use anyhow::Result;

use super::vm_structs::VmStructs;
use crate::interpreters::memory::Memory;

/// Maximum size of an encoded number, in bytes.
pub(super) const MAX_NUMBER_BYTES: usize = 5;
/// First JDK version that encodes numbers without zero bytes.
const WITHOUT_ZEROS: u32 = 20;

/// Encoding of numbers in a version of HotSpot.
#[derive(Debug, Clone, Copy)]
pub(super) struct Numbers {
    /// Number of byte values, from zero on, that are never used.
    pub(super) excluded: u8,
}

impl Numbers {
    /// Returns the encoding of the virtual machine in this memory.
    ///
    /// # Errors
    /// If the virtual machine does not publish its version.
    pub(super) fn of(memory: &Memory, structs: &VmStructs) -> Result<Self> {
        let version = structs.at("Abstract_VM_Version", "_vm_major_version")?;
        let version = memory.bytes(version).map(u32::from_ne_bytes)?;
        Ok(Self {
            excluded: u8::from(version >= WITHOUT_ZEROS),
        })
    }

    /// Decodes the number at the beginning of `bytes`, and returns the bytes after it. None if the bytes end before
    /// the number.
    pub(super) fn read(self, bytes: &[u8]) -> Option<(u32, &[u8])> {
        const BITS: u32 = 6;
        const FIRST_HIGH: u8 = 192;
        let mut number = 0u32;
        for (at, &byte) in bytes.iter().take(MAX_NUMBER_BYTES).enumerate() {
            let digit = u32::from(byte.checked_sub(self.excluded)?);
            number = number.wrapping_add(digit << (BITS * at as u32));
            if byte < FIRST_HIGH || at + 1 == MAX_NUMBER_BYTES {
                return Some((number, &bytes[at + 1..]));
            }
        }
        None
    }

    /// Decodes the signed number at the beginning of `bytes`, whose lowest bit is its sign, and returns the bytes
    /// after it. None if the bytes end before the number.
    pub(super) fn read_signed(self, bytes: &[u8]) -> Option<(i32, &[u8])> {
        let (number, rest) = self.read(bytes)?;
        let sign = -((number & 1) as i32);
        Some(((number >> 1) as i32 ^ sign, rest))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_are_as_hotspot_writes_them() {
        let old = Numbers { excluded: 0 };
        let new = Numbers { excluded: 1 };
        let read = |numbers: Numbers, bytes: &[u8]| numbers.read(bytes).map(|(number, _)| number);
        assert_eq!(read(old, &[0]), Some(0));
        assert_eq!(read(old, &[191]), Some(191));
        assert_eq!(read(old, &[192, 0]), Some(192));
        assert_eq!(read(old, &[255, 191]), Some(255 + 191 * 64));
        assert_eq!(read(new, &[1]), Some(0));
        assert_eq!(read(new, &[191]), Some(190));
        assert_eq!(read(new, &[192, 1]), Some(191));
        assert_eq!(read(new, &[0]), None);
        assert_eq!(read(old, &[192]), None);
        assert_eq!(
            old.read(&[255, 255, 255, 255, 255, 7])
                .map(|(_, rest)| rest),
            Some(&[7][..])
        );
    }

    #[test]
    fn the_lowest_bit_is_the_sign() {
        let numbers = Numbers { excluded: 0 };
        let read = |byte| numbers.read_signed(&[byte]).map(|(number, _)| number);
        assert_eq!([0, 1, 2, 3, 82].map(read), [0, -1, 1, -2, 41].map(Some));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_number_or_none(bytes: Vec<u8>, excluded in 0..2u8) {
            let _ = Numbers { excluded }.read_signed(&bytes);
        }
    }
}
