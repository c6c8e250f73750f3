//! Builder of rows from the unwind information of functions.

use gimli::{BaseAddresses, CfaRule, EhFrame, Operation, Register, RegisterRule, UnwindContext};

use super::{Expression, Fde, Slice, address_of, arch};
use crate::bpf::types::{
    unwind_frame_pointer as FramePointer, unwind_kind as Kind, unwind_row_layout as Layout,
};
use crate::code::registers::{self, FRAME_POINTER, RETURN_ADDRESS, STACK_POINTER, STAND_INS};

/// Rule for the registers that a row is about: they are as in the caller.
pub(super) const KEPT: (FramePointer, i8) = (FramePointer::UNWIND_FP_KEPT, 0);

/// Rows that are being built.
pub(super) struct Builder<'a> {
    pub(super) rows: Vec<u64>,
    /// Maximum number of rows.
    pub(super) max_rows: usize,
    pub(super) section: EhFrame<Slice<'a>>,
}

impl<'a> Builder<'a> {
    /// Adds a rule that is valid from an address on. There is no row for a rule that equals the previous one.
    pub(super) fn push(&mut self, address: u64, rule: u32) {
        match self.rows.last().copied() {
            Some(last) if last as u32 == rule => {}
            // The last rule would be valid for no instruction.
            Some(last) if address_of(last) == address => {
                self.rows.pop();
                self.push(address, rule);
            }
            _ => self.rows.push(address << 32 | u64::from(rule)),
        }
    }

    pub(super) fn run(
        &mut self,
        function: &Fde<'a>,
        bases: &BaseAddresses,
        context: &mut UnwindContext<usize>,
    ) {
        let start = function.initial_address();
        let strange = word(Kind::UNWIND_STRANGE, 0, None);
        if function.is_signal_trampoline() {
            return self.push(start, word(Kind::UNWIND_SIGNAL, 0, None));
        }
        let section = self.section;
        let Ok(mut table) = function.rows(&section, bases, context) else {
            return self.push(start, strange);
        };
        let mut reached = start;
        loop {
            match table.next_row() {
                Ok(Some(_)) if self.rows.len() > self.max_rows => return,
                Ok(Some(row)) => {
                    let (from, to) = (row.start_address(), row.end_address());
                    if from < reached || to > function.end_address() {
                        return self.push(reached, strange);
                    }
                    let cfa = row.cfa().clone();
                    let registers =
                        [FRAME_POINTER, RETURN_ADDRESS].map(|register| row.register(register));
                    let rule = self.rule(function, &cfa, &registers);
                    self.push(from, rule);
                    reached = to;
                }
                Ok(None) => return,
                // The rows that came before the error are valid.
                Err(_) => return self.push(reached.min(function.end_address() - 1), strange),
            }
        }
    }

    pub(super) fn rule(
        &self,
        function: &Fde<'a>,
        cfa: &CfaRule<usize>,
        [fp, return_address]: &[Option<RegisterRule<usize>>; 2],
    ) -> u32 {
        let strange = word(Kind::UNWIND_STRANGE, 0, None);
        if let Some(RegisterRule::Undefined) = return_address {
            return word(Kind::UNWIND_ROOT, 0, None);
        }
        let saved = (fp.as_ref(), return_address.as_ref());
        let Some(fp) = arch::saved(self, function, cfa, saved) else {
            return strange;
        };
        let (kind, offset, fp) = match *cfa {
            CfaRule::RegisterAndOffset {
                register: STACK_POINTER,
                offset,
            } => (Kind::UNWIND_BY_SP, cfa_words(offset), fp),
            CfaRule::RegisterAndOffset {
                register: FRAME_POINTER,
                offset,
            } => (Kind::UNWIND_BY_FP, cfa_words(offset), fp),
            CfaRule::RegisterAndOffset { register, offset }
                if STAND_INS.contains(&register) && fp == KEPT =>
            {
                let number = (KEPT.0, register.0 as i8);
                (Kind::UNWIND_BY_REGISTER, cfa_words(offset), number)
            }
            CfaRule::Expression(ref expression) => {
                match self.cfa_expression(function, expression) {
                    Some((kind, offset)) => (kind, Some(offset), fp),
                    None => return strange,
                }
            }
            CfaRule::RegisterAndOffset { .. } => return strange,
        };
        offset.map_or(strange, |offset| word(kind, offset, Some(fp)))
    }

    /// Decodes the kinds of CFA expressions that compilers and linkers make.
    pub(super) fn cfa_expression(
        &self,
        function: &Fde<'a>,
        expression: &Expression,
    ) -> Option<(Kind, i32)> {
        if let Some(byte) = registers::plt_push(expression.get(&self.section).ok()?.0.slice()) {
            return Some((Kind::UNWIND_PLT, i32::from(byte)));
        }
        let (base, offset, steps) = self.base_and_steps(function, expression)?;
        let Steps::Through(beyond) = steps else {
            return None;
        };
        let kind = match base {
            FRAME_POINTER => Kind::UNWIND_THROUGH_FP,
            STACK_POINTER => Kind::UNWIND_THROUGH_SP,
            _ => return None,
        };
        let (through, behind) = (short_words(offset)?, short_words(beyond)?);
        let [through, behind] = [through, behind].map(|words| u32::from(words.cast_unsigned()));
        let bits =
            through << Layout::UNWIND_THROUGH_SHIFT.0 | behind << Layout::UNWIND_BEHIND_SHIFT.0;
        Some((kind, bits.cast_signed() >> Layout::UNWIND_CFA_SHIFT.0))
    }

    /// Decodes an expression that is a register and an offset, or that dereferences this sum.
    pub(super) fn base_and_steps(
        &self,
        function: &Fde<'a>,
        expression: &Expression,
    ) -> Option<(Register, i64, Steps)> {
        let expression = expression.get(&self.section).ok()?;
        let mut operations = expression.operations(function.cie().encoding());
        let Operation::RegisterOffset {
            register, offset, ..
        } = operations.next().ok()??
        else {
            return None;
        };
        let steps = match operations.next().ok()? {
            None => Steps::None,
            Some(Operation::Deref {
                size: 8,
                space: false,
                ..
            }) => match operations.next().ok()? {
                None => Steps::Through(0),
                Some(Operation::PlusConstant { value }) => {
                    Steps::Through(i64::try_from(value).ok()?)
                }
                _ => return None,
            },
            _ => return None,
        };
        operations
            .next()
            .ok()?
            .is_none()
            .then_some((register, offset, steps))
    }
}

/// Operations of an expression on the sum of its register and offset.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Steps {
    None,
    /// The word at the sum is loaded, and this number of bytes is added.
    Through(i64),
}

/// Converts an offset to words, if it is a whole number of them.
pub(super) fn words(bytes: i64) -> Option<i64> {
    (bytes % 8 == 0).then_some(bytes / 8)
}

/// Converts an offset to words. Returns None if eight bits cannot hold it.
pub(super) fn short_words(bytes: i64) -> Option<i8> {
    i8::try_from(words(bytes)?).ok()
}

/// Converts the offset of a CFA to words. Returns None if a row cannot hold it: below zero, or of more words than fit
/// into the bits from `UNWIND_CFA_SHIFT` on.
fn cfa_words(bytes: i64) -> Option<i32> {
    let words = u32::try_from(words(bytes)?).ok()?;
    let fits = words <= u32::MAX >> Layout::UNWIND_CFA_SHIFT.0;
    fits.then_some(words.cast_signed())
}

/// Encodes a row without its address.
pub(super) fn word(kind: Kind, offset: i32, fp: Option<(FramePointer, i8)>) -> u32 {
    let (fp, fp_offset) = fp.unwrap_or(KEPT);
    offset.cast_unsigned() << Layout::UNWIND_CFA_SHIFT.0
        | u32::from(fp_offset.cast_unsigned()) << Layout::UNWIND_FP_OFFSET_SHIFT.0
        | fp.0 << Layout::UNWIND_FP_SHIFT.0
        | kind.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_holds_frames_up_to_its_last_bit() {
        let most = u32::MAX >> Layout::UNWIND_CFA_SHIFT.0;
        for words in [0, 1, most / 2 + 1, most] {
            let offset = cfa_words(i64::from(words) * 8).expect("it fits");
            let row = word(Kind::UNWIND_BY_SP, offset, None);
            assert_eq!(row >> Layout::UNWIND_CFA_SHIFT.0, words);
        }
        for bytes in [-8, 4, (i64::from(most) + 1) * 8, i64::MAX & !7] {
            assert_eq!(cfa_words(bytes), None, "{bytes}");
        }
    }
}
