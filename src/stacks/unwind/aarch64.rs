//! What a row has of the registers of arm64: where the frame pointer and the return address are saved.

use gimli::{CfaRule, RegisterRule};

use super::Fde;
use super::builder::{Builder, KEPT, short_words, word};
use crate::bpf::types::{unwind_frame_pointer as FramePointer, unwind_kind as Kind};
use crate::code::frame_at_call::FrameAtCall;

/// Rules for the frame pointer and for the return address.
type Saved<'a> = (
    Option<&'a RegisterRule<usize>>,
    Option<&'a RegisterRule<usize>>,
);

/// Returns how the caller's frame pointer and the return address are found, with the offset in words. Returns None if
/// the rules fit no row.
///
/// Functions save both beside each other, the return address above, or the return address alone, or, where LLVM does
/// not use the frame pointer as such, with one word between them. In a large frame they are far from the CFA, but near
/// its base.
pub(super) fn saved<'a>(
    _builder: &Builder<'a>,
    _function: &Fde<'a>,
    cfa: &CfaRule<usize>,
    (fp, return_address): Saved<'_>,
) -> Option<(FramePointer, i8)> {
    let base = match *cfa {
        CfaRule::RegisterAndOffset { offset, .. } => Some(offset),
        CfaRule::Expression(_) => None,
    };
    let place = |offset: i64, at_cfa: FramePointer, at_base: FramePointer| {
        let near = short_words(offset).map(|words| (at_cfa, words));
        near.or_else(|| Some((at_base, short_words(offset.checked_add(base?)?)?)))
    };
    let is_kept =
        |rule: Option<&RegisterRule<usize>>| matches!(rule, None | Some(RegisterRule::SameValue));
    match (fp, return_address) {
        (fp, link) if is_kept(fp) && is_kept(link) => Some(KEPT),
        (Some(&RegisterRule::Offset(fp)), Some(&RegisterRule::Offset(link)))
            if fp.checked_add(8) == Some(link) =>
        {
            place(
                fp,
                FramePointer::UNWIND_FP_AT_CFA,
                FramePointer::UNWIND_FP_AT_BASE,
            )
        }
        (Some(&RegisterRule::Offset(fp)), Some(&RegisterRule::Offset(link)))
            if fp.checked_add(16) == Some(link) =>
        {
            Some((FramePointer::UNWIND_FP_BELOW, short_words(link)?))
        }
        (fp, Some(&RegisterRule::Offset(link))) if is_kept(fp) => place(
            link,
            FramePointer::UNWIND_LINK_AT_CFA,
            FramePointer::UNWIND_LINK_AT_BASE,
        ),
        _ => None,
    }
}

/// Returns the row of the function of Go's runtime that calls C on another stack: none is known, and walks end there.
pub(super) fn go_switch() -> Option<u32> {
    None
}

/// Returns the row of a function that has called another one: no such frame is known.
pub(super) fn rule_at_call(_frame: FrameAtCall) -> u32 {
    word(Kind::UNWIND_STRANGE, 0, None)
}
