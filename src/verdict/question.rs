//! Questions of `--why`: which blocks they are about.

use std::ops::RangeInclusive;

use crate::parse;
use crate::print::text;

/// Blocks that a question of --why is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum WhyQuery {
    /// The block that an address is in.
    Address(u64),
    /// All blocks of these sizes, or only the unnamed ones.
    Sizes {
        sizes: RangeInclusive<u64>,
        unnamed: bool,
    },
    /// All blocks of a type, or those that a function of this name has allocated.
    Name(String),
}

impl WhyQuery {
    /// Parses a question: an address, a size or a name, as reports print them or as people write them.
    pub(super) fn parse(text: &str) -> Self {
        if let Some(Ok(address)) = text
            .strip_prefix("0x")
            .map(|hex| u64::from_str_radix(hex, 16))
        {
            return Self::Address(address);
        }
        if let Some(sizes) = printed_sizes(text) {
            return Self::Sizes {
                sizes,
                unnamed: true,
            };
        }
        parse::bytes(text).map_or_else(
            |_| Self::Name(text.to_owned()),
            |bytes| Self::Sizes {
                sizes: bytes..=bytes,
                unnamed: false,
            },
        )
    }
}

/// Parses the descriptions of unnamed blocks in all reports: `unnamed, 216 bytes each`, `[216]`, `blocks of 216 bytes`,
/// `blocks of 1025 to 2048 bytes`, `blocks of up to 32 bytes`, and `up to 2048`.
fn printed_sizes(text: &str) -> Option<RangeInclusive<u64>> {
    let number = |text: &str| text.replace(',', "").parse::<u64>().ok();
    let exactly = |text| number(text).map(|bytes| bytes..=bytes);
    let inside = |before: &str, behind: &str| text.strip_prefix(before)?.strip_suffix(behind);
    if let Some(size) = inside("unnamed, ", " bytes each").or_else(|| inside("[", "]")) {
        return exactly(size);
    }
    if let Some(limit) = text.strip_prefix("up to ") {
        let limit = number(limit)?;
        return Some(limit / 2 + 1..=limit);
    }
    let sizes = inside("blocks of ", " bytes")?;
    if let Some(limit) = sizes.strip_prefix("up to ") {
        return Some(0..=number(limit)?);
    }
    match sizes.split_once(" to ") {
        Some((first, last)) => Some(number(first)?..=number(last)?),
        None => exactly(sizes),
    }
}

/// Whether a question is about the type `name`, of which a block has `bytes` bytes: the name itself, as it is printed,
/// or with a size, as `Session [48]`.
pub(super) fn is_named(question: &str, name: &str, bytes: u64) -> bool {
    let is = |question: &str| {
        question == name || question == text::escape(name) || question == text::display_name(name)
    };
    let sized = question.strip_suffix(&format!(" [{bytes}]"));
    is(question) || sized.is_some_and(is)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_are_of_addresses_sizes_or_types() {
        let of = WhyQuery::parse;
        assert_eq!(of("0x7f001000"), WhyQuery::Address(0x7f00_1000));
        let sizes = |sizes, unnamed| WhyQuery::Sizes { sizes, unnamed };
        assert_eq!(of("4008"), sizes(4008..=4008, false));
        assert_eq!(of("4K"), sizes(4096..=4096, false));
        for (printed, expected) in [
            ("unnamed, 216 bytes each", 216..=216),
            ("[216]", 216..=216),
            ("blocks of 216 bytes", 216..=216),
            ("blocks of 1025 to 2048 bytes", 1025..=2048),
            ("blocks of up to 32 bytes", 0..=32),
            ("up to 2048", 1025..=2048),
        ] {
            assert_eq!(of(printed), sizes(expected, true), "{printed}");
        }
        assert_eq!(of("app::Session"), WhyQuery::Name("app::Session".into()));
        assert_eq!(of("0xyz"), WhyQuery::Name("0xyz".into()));
    }

    #[test]
    fn types_are_found_as_they_are_printed() {
        let name = format!("std::map<a\u{202e}, {}>", "x".repeat(10_000));
        for printed in [
            name.clone(),
            text::escape(&name).into_owned(),
            text::display_name(&name),
        ] {
            assert!(is_named(&printed, &name, 48), "{printed}");
            assert!(is_named(&format!("{printed} [48]"), &name, 48));
            assert!(!is_named(&format!("{printed} [48]"), &name, 64));
        }
    }
}
