//! What a row has of the registers of x86-64. The return address is in the word below the CFA, where the call has
//! pushed it.

use std::ops::Range;

use anyhow::Result;
use gimli::{CfaRule, RegisterRule};

use super::Fde;
use super::builder::{Builder, KEPT, Steps, short_words, word};
use crate::bpf::types::{unwind_frame_pointer as FramePointer, unwind_kind as Kind};
use crate::code::elf_file::Elf;
use crate::code::frame_at_call::FrameAtCall;
use crate::code::registers::FRAME_POINTER;

/// Place of the return address, in bytes from the CFA.
const RETURN_ADDRESS_AT: i64 = -8;

/// Rules for the frame pointer and for the return address.
type Saved<'a> = (
    Option<&'a RegisterRule<usize>>,
    Option<&'a RegisterRule<usize>>,
);

/// Returns how the caller's frame pointer is found, with the offset in words. Returns None if the rules fit no row.
pub(super) fn saved<'a>(
    builder: &Builder<'a>,
    function: &Fde<'a>,
    _cfa: &CfaRule<usize>,
    (fp, return_address): Saved<'_>,
) -> Option<(FramePointer, i8)> {
    if return_address != Some(&RegisterRule::Offset(RETURN_ADDRESS_AT)) {
        return None;
    }
    Some(match fp {
        // The frame pointer is a register that functions preserve.
        None | Some(RegisterRule::SameValue) => KEPT,
        Some(&RegisterRule::Offset(offset)) => {
            (FramePointer::UNWIND_FP_AT_CFA, short_words(offset)?)
        }
        Some(RegisterRule::Expression(expression)) => {
            let (base, offset, steps) = builder.base_and_steps(function, expression)?;
            if base != FRAME_POINTER || steps != Steps::None {
                return None;
            }
            (FramePointer::UNWIND_FP_AT_FP, short_words(offset)?)
        }
        _ => (FramePointer::UNWIND_FP_FORGOTTEN, 0),
    })
}

/// Returns the row of the function of Go's runtime that calls C on another stack: the frame pointer leads to the
/// goroutine's stack.
pub(super) fn go_switch() -> Option<u32> {
    Some(word(
        Kind::UNWIND_BY_FP,
        2,
        Some((FramePointer::UNWIND_FP_AT_FP, 0)),
    ))
}

/// Returns the row of a function that has called another one.
pub(super) fn rule_at_call(frame: FrameAtCall) -> u32 {
    let fp = match frame.saves_frame_pointer {
        true => (FramePointer::UNWIND_FP_AT_CFA, -2),
        false => KEPT,
    };
    word(Kind::UNWIND_BY_SP, frame.words, Some(fp))
}

/// Returns the rules for functions of the vdso that have no frame: none, as the vdso has unwind information.
pub(super) fn functions_without_frame(_vdso: &Elf<'_>) -> Result<Vec<(Range<u64>, u32)>> {
    Ok(Vec::new())
}
