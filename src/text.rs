//! Strings that come from other processes, made safe for a terminal.
//!
//! A process chooses its own name, its file names and its symbols, and can put terminal escape
//! sequences into them.

use std::borrow::Cow;
use std::ffi::c_char;
use std::fmt::Write;

/// `name` with control characters as `\xNN`, and with what is not UTF-8 replaced byte by byte.
pub fn escape(name: &str) -> Cow<'_, str> {
    if !name.chars().any(char::is_control) {
        return Cow::Borrowed(name);
    }
    let mut safe = String::with_capacity(name.len() + 8);
    for c in name.chars() {
        if c.is_control() {
            // Writing to a String does not fail.
            let _ = write!(safe, "\\x{:02x}", u32::from(c));
        } else {
            safe.push(c);
        }
    }
    Cow::Owned(safe)
}

/// [`escape`] for bytes that need not be UTF-8.
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

/// The text up to the first NUL of a C string's array, escaped.
pub fn from_c(array: &[c_char]) -> String {
    let bytes: Vec<u8> = array
        .iter()
        .map(|&c| c.cast_unsigned())
        .take_while(|&byte| byte != 0)
        .collect();
    escape_bytes(&bytes)
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
    fn bytes_that_are_not_utf8_are_shown_one_by_one() {
        assert_eq!(escape_bytes(b"a\xff\xfeb\x07"), "a\\xff\\xfeb\\x07");
    }

    #[test]
    fn a_c_string_ends_at_its_nul() {
        let comm = *b"sh\0garbage";
        assert_eq!(from_c(&comm.map(|b| b as c_char)), "sh");
        assert_eq!(from_c(&b"full".map(|b| b as c_char)), "full");
    }
}
