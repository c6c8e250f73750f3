//! Code object of CPython: a compiled function, class body, module or comprehension.

use std::fmt::Write;

use crate::interpreters::python::lines::{self, Instruction};
use crate::print::text;

/// Names and lines of a code object, for the frames that execute it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Code {
    /// `co_filename`: the source file as it was passed to Python, escaped; `<string>` and the like if there is none.
    pub file: String,
    /// `co_qualname`, such as `Order.load.<locals>.row`, escaped; before 3.11 `co_name`.
    pub name: String,
    /// `co_firstlineno`.
    pub first_line: u32,
    /// The minor version of the CPython that compiled the code object: 11 for 3.11.
    pub minor: u8,
    /// The line table; None if it could not be read.
    pub lines: Option<Box<[u8]>>,
}

impl Code {
    /// Returns the source line of an instruction. None if the instruction belongs to no line, or the line is unknown.
    pub fn line(&self, instruction: Instruction) -> Option<u32> {
        let lines = match (&self.lines, instruction) {
            (Some(lines), _) => lines,
            (None, Instruction::NotBegun) => &[][..],
            (None, Instruction::At(_)) => return None,
        };
        lines::line(self.minor, lines, self.first_line, instruction)
    }

    /// Returns whether this is the code object `_Py_InitCleanup`. CPython 3.12 and later run it in a frame between
    /// the call of a class and its `__init__`; no function of the program is in this frame. `sys._getframe()` skips
    /// the frame, too.
    pub(crate) fn is_shim(&self) -> bool {
        self.minor >= 12 && self.name == "__init__" && self.file == "__init__"
    }

    /// Returns the approximate size of the code object in memory, in bytes.
    pub(super) fn size(&self) -> usize {
        let lines = self.lines.as_ref().map_or(0, |lines| lines.len());
        size_of::<Self>() + self.file.capacity() + self.name.capacity() + lines
    }
}

/// How the characters of a `str` are stored (PEP 393).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Characters {
    /// A byte each: ASCII or Latin-1.
    One,
    /// Two bytes each.
    Two,
    /// Four bytes each.
    Four,
}

impl Characters {
    /// Returns the kind for this number of bytes per character, which is `kind` in CPython.
    pub fn of_kind(kind: u8) -> Option<Self> {
        Some(match kind {
            1 => Self::One,
            2 => Self::Two,
            4 => Self::Four,
            _ => return None,
        })
    }

    /// Decodes these bytes, and escapes and cuts the text like all text of other processes. For a file name that is
    /// not UTF-8, Python has a lone surrogate for each undecodable byte (PEP 383); the surrogate is shown
    /// as that byte.
    pub fn text(self, bytes: &[u8]) -> String {
        let numbers: Vec<u32> = match self {
            Self::One => bytes.iter().map(|&byte| byte.into()).collect(),
            Self::Two => {
                let (characters, _) = bytes.as_chunks();
                let characters = characters.iter();
                characters
                    .map(|&character| u16::from_le_bytes(character).into())
                    .collect()
            }
            Self::Four => {
                let (characters, _) = bytes.as_chunks();
                let characters = characters.iter();
                characters
                    .map(|&character| u32::from_le_bytes(character))
                    .collect()
            }
        };
        let mut text = String::new();
        let mut valid = String::new();
        for number in numbers {
            match (char::from_u32(number), number) {
                (Some(character), _) => valid.push(character),
                (None, 0xdc80..=0xdcff) => {
                    text += &text::escape(&valid);
                    valid.clear();
                    // Writing to a String does not fail.
                    let _ = write!(text, "\\x{:02x}", number & 0xff);
                }
                (None, _) => valid.push(char::REPLACEMENT_CHARACTER),
            }
        }
        text += &text::escape(&valid);
        text::display_name(&text)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn code(minor: u8, name: &str, file: &str) -> Code {
        Code {
            file: file.into(),
            name: name.into(),
            first_line: 41,
            minor,
            lines: Some([0x80 | 13 << 3, 4].into()),
        }
    }

    #[test]
    fn a_line_is_that_of_the_table_and_none_without_one() {
        let mut of = code(11, "load_orders", "orders.py");
        assert_eq!(of.line(Instruction::At(0)), Some(43));
        assert_eq!(of.line(Instruction::NotBegun), Some(41));
        of.lines = None;
        assert_eq!(of.line(Instruction::At(0)), None);
        assert_eq!(of.line(Instruction::NotBegun), Some(41));
    }

    #[test]
    fn the_shim_of_constructors_is_told_from_a_function_of_that_name() {
        assert!(code(12, "__init__", "__init__").is_shim());
        assert!(!code(11, "__init__", "__init__").is_shim());
        assert!(!code(12, "Order.__init__", "orders.py").is_shim());
        assert!(!code(12, "__init__", "__init__.py").is_shim());
    }

    #[test]
    fn text_is_what_python_shows() {
        assert_eq!(Characters::One.text(b"caf\xe9"), "caf\u{e9}");
        let wide: Vec<u8> = "\u{51fd}\u{6570}"
            .encode_utf16()
            .flat_map(u16::to_le_bytes)
            .collect();
        assert_eq!(Characters::Two.text(&wide), "\u{51fd}\u{6570}");
        let widest: Vec<u8> = "g\u{1f40d}"
            .chars()
            .flat_map(|c| u32::from(c).to_le_bytes())
            .collect();
        assert_eq!(Characters::Four.text(&widest), "g\u{1f40d}");
    }

    #[test]
    fn what_a_terminal_must_not_see_is_escaped() {
        assert_eq!(Characters::One.text(b"\x1b[2Jx"), "\\x1b[2Jx");
        let bytes: Vec<u8> = [0xdcffu16, 0x1b, 0xd800, 0x202e, 0x78]
            .into_iter()
            .flat_map(u16::to_le_bytes)
            .collect();
        assert_eq!(Characters::Two.text(&bytes), "\\xff\\x1b\u{fffd}\\u{202e}x");
        let long = Characters::One.text(&[b'n'; 100_000]);
        assert!(long.len() < 5_000 && long.ends_with("[...]"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_text(kind in 0..6u8, bytes: Vec<u8>) {
            if let Some(characters) = Characters::of_kind(kind) {
                let text = characters.text(&bytes);
                prop_assert!(!text.chars().any(char::is_control), "{text:?}");
            }
        }
    }
}
