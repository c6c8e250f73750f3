//! What a row has of the registers of arm64: where the frame pointer and the return address are saved.

use std::ops::Range;

use anyhow::Result;
use gimli::{CfaRule, RegisterRule};
use object::elf;

use super::Fde;
use super::builder::{Builder, KEPT, short_words, word};
use crate::bpf::types::{unwind_frame_pointer as FramePointer, unwind_kind as Kind};
use crate::code::elf_file::Elf;
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

/// Maximum size of a function of the vdso, in bytes.
const MAX_FUNCTION: u64 = 1 << 16;

/// Returns the rules for those functions of the vdso that have no frame, such as clock_gettime's: the return address is
/// in the link register. The vdso of arm64 has no unwind information. Its other functions keep frame pointers.
pub(super) fn functions_without_frame(vdso: &Elf<'_>) -> Result<Vec<(Range<u64>, u32)>> {
    let mut functions = Vec::new();
    let Some((symbols, _)) = vdso.symbol_table(elf::SHT_DYNSYM) else {
        return Ok(functions);
    };
    vdso.each_function(symbols, |symbol| {
        let Some(offset) = vdso.file_offset(symbol.address) else {
            return Ok(());
        };
        let code = vdso.bytes(offset, symbol.size.min(MAX_FUNCTION) as usize)?;
        if !code.is_empty() && !has_frame(&code) {
            let function = symbol.address..symbol.address + code.len() as u64;
            functions.push((function, word(Kind::UNWIND_BY_SP, 0, None)));
        }
        Ok(())
    })?;
    Ok(functions)
}

/// Whether a function with this code changes the stack pointer or calls another function. Otherwise it can save no
/// register, and leaves the return address and the frame pointer where they are.
fn has_frame(code: &[u8]) -> bool {
    let (instructions, _) = code.as_chunks::<4>();
    let mut instructions = instructions.iter().map(|bytes| u32::from_le_bytes(*bytes));
    instructions.any(|instruction| {
        let is = |mask, value| instruction & mask == value;
        // add, sub of an immediate and of a register, to the stack pointer
        is(0x3f80_001f, 0x1100_001f)
            || is(0x3fe0_001f, 0x0b20_001f)
            // ldr, str with a change of the stack pointer before or behind, and ldp, stp
            || is(0x3b20_07e0, 0x3800_07e0)
            || is(0x3a80_03e0, 0x2880_03e0)
            // bl, blr
            || is(0xfc00_0000, 0x9400_0000)
            || is(0xffff_fc1f, 0xd63f_0000)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_leaves_the_stack_alone_has_no_frame() {
        let code = |first: u32| [first, 0xd65f_03c0].map(u32::to_le_bytes).concat();
        // add x5,sp,x5; cmp x0,#31; svc #0; ldr x0,[sp,#8]; stp x0,x1,[x2],#16; str x1,[x2,#8]!; cmp sp,#1;
        // cmp sp,x12
        for kept in [
            0x8b25_63e5,
            0xf100_7c1f,
            0xd400_0001,
            0xf940_07e0,
            0xa881_0440,
            0xf800_8c41,
            0xf100_07ff,
            0xeb2c_63ff_u32,
        ] {
            assert!(!has_frame(&code(kept)), "{kept:x}");
        }
        // sub sp,sp,#32; add sp,sp,#16; mov sp,x29; stp x29,x30,[sp,#-128]!; ldp x29,x30,[sp],#16; str x30,[sp,#-16]!;
        // ldr x30,[sp],#16; str d0,[sp,#-16]!; bl; blr x1; sub sp,sp,x12
        for changed in [
            0xd100_83ff,
            0x9100_43ff,
            0x9100_03bf,
            0xa9b8_7bfd,
            0xa8c1_7bfd,
            0xf81f_0ffe,
            0xf841_07fe,
            0xfc1f_0fe0,
            0x9400_00a2,
            0xd63f_0020,
            0xcb2c_63ff_u32,
        ] {
            assert!(has_frame(&code(changed)), "{changed:x}");
        }
    }
}
