//! Strings that come from other processes, made safe for a terminal.
//!
//! A process chooses its own name, its file names and its symbols, and can put terminal escape
//! sequences into them.

use std::borrow::Cow;
use std::fmt::Write;

use icu_properties::props::{DefaultIgnorableCodePoint, GeneralCategory, GeneralCategoryGroup};
use icu_properties::{CodePointMapData, CodePointSetData};
use serde::Serializer;

/// Maximum number of bytes that are shown of a symbol's name. C++ has longer names, which are not readable.
pub const MAX_NAME: usize = 4096;

/// Escapes control characters in `name` as `\xNN`, and other characters that are not seen, but change how a line is
/// shown or whether two names are the same, as `\u{NNNN}`.
pub fn escape(name: &str) -> Cow<'_, str> {
    if !name.chars().any(|c| c.is_control() || is_unseen(c)) {
        return Cow::Borrowed(name);
    }
    let mut safe = String::with_capacity(name.len() + 8);
    for c in name.chars() {
        if c.is_control() {
            // Writing to a String does not fail.
            let _ = write!(safe, "\\x{:02x}", u32::from(c));
        } else if is_unseen(c) {
            let _ = write!(safe, "{}", c.escape_unicode());
        } else {
            safe.push(c);
        }
    }
    Cow::Owned(safe)
}

/// Whether a character has no shape of its own, or turns text from right to left, or begins a line: a name with it would
/// look like another. By Unicode's properties: formats (Cf), line and paragraph separators, and what may be omitted
/// when it cannot be shown, such as variation selectors.
fn is_unseen(c: char) -> bool {
    const UNSEEN: GeneralCategoryGroup = GeneralCategoryGroup::Format
        .union(GeneralCategoryGroup::LineSeparator)
        .union(GeneralCategoryGroup::ParagraphSeparator);
    // ASCII has none, and names are mostly ASCII.
    !c.is_ascii()
        && (UNSEEN.contains(CodePointMapData::<GeneralCategory>::new().get(c))
            || CodePointSetData::new::<DefaultIgnorableCodePoint>().contains(c))
}

/// Returns a symbol's name as it is shown: escaped, and cut where it is too long, which is marked.
pub fn display_name(name: &str) -> String {
    let cut = truncate(name, MAX_NAME);
    let mark = if cut.len() < name.len() { "[...]" } else { "" };
    format!("{}{mark}", escape(cut))
}

/// Returns the beginning of a text, in whole characters, of at most `bytes` bytes.
pub fn truncate(text: &str, bytes: usize) -> &str {
    let mut end = bytes.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Escapes bytes that need not be UTF-8, like [`escape`].
pub fn escape_bytes(name: &[u8]) -> String {
    let mut safe = String::with_capacity(name.len());
    for chunk in name.utf8_chunks() {
        safe.push_str(&escape(chunk.valid()));
        for byte in chunk.invalid() {
            let _ = write!(safe, "\\x{byte:02x}");
        }
    }
    safe
}

/// Returns the text up to the first NUL of a C string's array, escaped.
pub fn from_c(array: &[i8]) -> String {
    let bytes: Vec<u8> = array
        .iter()
        .map(|&c| c.cast_unsigned())
        .take_while(|&byte| byte != 0)
        .collect();
    escape_bytes(&bytes)
}

/// Serializes an address or an id as a string of hexadecimal digits, such as `0x7f00`.
///
/// # Errors
/// If the serializer fails.
pub fn serialize_address<S: Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{value:#x}"))
}

/// Formats bytes as hexadecimal digits, as build ids are written.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Wraps the text at spaces, into lines of at most `width` characters. A number and its unit stay in one line.
pub fn wrapped(text: &str, width: usize) -> Vec<String> {
    const UNITS: [&str; 8] = ["bytes", "kB", "MB", "GB", "TB", "ms", "s", "%"];
    let is_unit = |word: &str| UNITS.contains(&word.trim_end_matches([',', ';', ':', '.', ')']));
    let is_number = |word: &str| word.ends_with(|c: char| c.is_ascii_digit());
    let mut pieces: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match pieces.last_mut() {
            Some(number) if is_number(number) && is_unit(word) => *number += &format!(" {word}"),
            _ => pieces.push(word.to_owned()),
        }
    }
    let mut lines: Vec<String> = Vec::new();
    for piece in pieces {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + piece.chars().count() <= width => {
                line.push(' ');
                line.push_str(&piece);
            }
            _ => lines.push(piece),
        }
    }
    lines
}

/// Formats a number with groups of digits: `1204331` as `1,204,331`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a number of things for people: `1 block`, `1,204,331 blocks`.
pub fn count_with_noun(number: u64, thing: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {thing}{plural}", grouped(number))
}

/// Formats a number of bytes for people, in powers of 1000: `999 bytes`, `5.2 MB`.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["kB", "MB", "GB", "TB", "PB", "EB"];
    let (mut value, mut unit) = (bytes as f64, "bytes");
    for larger in UNITS {
        // A value that would be rounded up to 1000 belongs to the next unit.
        if value < 999.95 {
            break;
        }
        (value, unit) = (value / 1000.0, larger);
    }
    match unit {
        "bytes" => count_with_noun(bytes, "byte"),
        unit => format!("{value:.1} {unit}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_shown_not_sent() {
        assert_eq!(escape("plain name"), "plain name");
        assert_eq!(escape("red\x1b[31m\n"), "red\\x1b[31m\\x0a");
        assert_eq!(escape("c1 \u{9b}31m"), "c1 \\x9b31m");
        assert_eq!(escape("größe"), "größe");
    }

    #[test]
    fn what_rearranges_a_line_is_shown() {
        assert_eq!(escape("a\u{202e}b\u{2066}c"), "a\\u{202e}b\\u{2066}c");
        assert_eq!(
            escape("line\u{2028}line\u{2029}"),
            "line\\u{2028}line\\u{2029}"
        );
        assert_eq!(escape("שלום"), "שלום");
    }

    #[test]
    fn characters_without_width_are_shown() {
        for c in [
            '\u{ad}',
            '\u{34f}',
            '\u{115f}',
            '\u{200b}',
            '\u{200c}',
            '\u{200d}',
            '\u{2060}',
            '\u{3164}',
            '\u{fe0f}',
            '\u{feff}',
            '\u{fff9}',
            '\u{e0041}',
            '\u{e0100}',
            '\u{1d173}',
        ] {
            let name = format!("s{c}h");
            assert_eq!(escape(&name), format!("s\\u{{{:x}}}h", u32::from(c)));
            assert_eq!(escape_bytes(name.as_bytes()), escape(&name));
        }
        // An accent that is a character of its own, and scripts of other directions, are as they were.
        for name in ["e\u{301}", "日本語", "नमस्ते", "سلام", "🦀"] {
            assert_eq!(escape(name), name);
        }
    }

    #[test]
    fn a_long_name_is_cut_between_characters() {
        assert_eq!(display_name("short"), "short");
        let long = "ö".repeat(MAX_NAME);
        let shown = display_name(&format!("x{long}"));
        assert_eq!(shown.len(), MAX_NAME - 1 + "[...]".len());
        assert!(shown.ends_with("ö[...]"));
    }

    #[test]
    fn digits_are_grouped() {
        let texts = [0, 999, 1000, 123_456, 1_000_000].map(grouped);
        assert_eq!(texts, ["0", "999", "1,000", "123,456", "1,000,000"]);
        let texts = [0, 1, 1000].map(|number| count_with_noun(number, "block"));
        assert_eq!(texts, ["0 blocks", "1 block", "1,000 blocks"]);
    }

    #[test]
    fn a_number_is_not_parted_from_its_unit() {
        let text = "32,551 blocks, 8.7 MB; paused 17.1 and 16.2 ms";
        assert_eq!(
            wrapped(text, 18),
            ["32,551 blocks,", "8.7 MB; paused", "17.1 and 16.2 ms"]
        );
        assert_eq!(wrapped("free (94 %); 7", 9), ["free", "(94 %); 7"]);
        assert_eq!(wrapped("a bytes", 3), ["a", "bytes"]);
    }

    #[test]
    fn bytes_are_in_the_unit_that_fits() {
        let texts = [0, 999, 1000, 5_242_880, 999_949, 999_950, u64::MAX].map(bytes);
        assert_eq!(
            texts,
            [
                "0 bytes",
                "999 bytes",
                "1.0 kB",
                "5.2 MB",
                "999.9 kB",
                "1.0 MB",
                "18.4 EB"
            ]
        );
    }

    #[test]
    fn bytes_that_are_not_utf8_are_shown_one_by_one() {
        assert_eq!(escape_bytes(b"a\xff\xfeb\x07"), "a\\xff\\xfeb\\x07");
    }

    #[test]
    fn a_c_string_ends_at_its_nul() {
        let comm = *b"sh\0garbage";
        assert_eq!(from_c(&comm.map(|b| b as i8)), "sh");
        assert_eq!(from_c(&b"full".map(|b| b as i8)), "full");
    }
}
