//! What the walks of allocators share: the memory that they read is another user's, and may say anything.

use crate::heap::image::Image;

/// How many more words may be looked at: what a walk takes is bounded, whatever the memory says.
#[derive(Debug)]
pub(super) struct Fuel(pub(super) u64);

impl Fuel {
    /// What the walk of an image may take: each 16 bytes can begin a block, which takes a few looks.
    pub(super) fn of(image: &Image) -> Self {
        Self(image.copied_bytes() / 2 + 50_000_000)
    }

    /// Whether so many more may be looked at.
    pub(super) fn burn(&mut self, words: u64) -> bool {
        self.0 = self.0.saturating_sub(words);
        self.0 > 0
    }
}

/// The word at an address; 0 where there is none.
pub(super) fn word(image: &Image, address: u64) -> u64 {
    image.word(address).unwrap_or(0)
}
