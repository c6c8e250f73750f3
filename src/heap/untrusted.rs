//! Bounds and reads that the walks of allocators share. The walked memory belongs to another user, and may hold
//! anything.

use crate::heap::image::Image;

/// Budget of words that a walk may still look at. The budget bounds a walk whatever the memory holds.
#[derive(Debug)]
pub(super) struct Fuel(pub(super) u64);

impl Fuel {
    /// Returns the budget for the walk of an image. Each 16 bytes can begin a block, which takes a few looks.
    pub(super) fn of(image: &Image) -> Self {
        Self(image.copied_bytes() / 2 + 50_000_000)
    }

    /// Spends `words` words of the budget. Returns whether any are left.
    pub(super) fn burn(&mut self, words: u64) -> bool {
        self.0 = self.0.saturating_sub(words);
        self.0 > 0
    }
}

/// Returns the word at an address; 0 if it was not copied.
pub(super) fn word(image: &Image, address: u64) -> u64 {
    image.word(address).unwrap_or(0)
}
