//! Blocks that hold text.

use crate::heap::blocks::Block;
use crate::heap::image::Image;
use crate::heap::names::shapes::fits;

/// Smallest length of a text, in bytes. With less, a word or a tag at the start of a structure could be meant.
const MIN_TEXT: usize = 9;

/// Whether a block holds a C string that fills it: printable ASCII and UTF-8, tabs and line ends, up to the first NUL.
///
/// A structure that begins with a short text has other data after it, and is larger.
pub(super) fn is_text(image: &Image, block: Block) -> bool {
    let Some(bytes) = image.bytes(block.range()) else {
        return false;
    };
    let length = memchr::memchr(0, bytes).unwrap_or(bytes.len());
    let text = &bytes[..length];
    let fills = length == bytes.len() || fits(block, length as u64 + 1);
    length >= MIN_TEXT && fills && str::from_utf8(text).is_ok_and(|text| text.chars().all(is_shown))
}

fn is_shown(character: char) -> bool {
    matches!(character, '\t' | '\n' | '\r') || !character.is_control()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::image::made::ImageBuilder;

    #[test]
    fn text_fills_its_block() {
        let is = |content: &[u8], size: u64| {
            let mut made = ImageBuilder::default();
            made.put_bytes(0x1000, content);
            is_text(
                &made.image(),
                Block {
                    address: 0x1000,
                    size,
                },
            )
        };
        assert!(is(b"/etc/ld.so.conf", 24) && is("größe\tund länge\n".as_bytes(), 40));
        assert!(is(&[b'x'; 24], 24));
        assert!(!is(b"short", 24) && !is(b"/etc/ld.so.conf", 104));
        assert!(!is(b"/etc/ld.so\x01conf", 24) && !is(b"/etc/ld.so\xffconf", 24));
        assert!(!is(b"/etc/ld.so.conf", 0x2000));
    }
}
