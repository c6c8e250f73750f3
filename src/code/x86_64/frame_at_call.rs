//! The frame that a function has when it calls another one, by its machine code, for code without unwind information.

use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind, Register,
};

/// Frame of a function at its first call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FrameAtCall {
    /// Words from the stack pointer, after the call has returned, to the CFA.
    pub(crate) words: i32,
    /// Whether the caller's frame pointer is in the word below the return address. Otherwise it is in its register.
    pub(crate) saves_frame_pointer: bool,
}

impl FrameAtCall {
    /// Returns the frame of the function that begins with this code; None if the code does not tell.
    pub(crate) fn of(code: &[u8]) -> Option<Self> {
        const WORD: i32 = 8;
        /// Bytes of a frame at most.
        const MAX_BYTES: i32 = 1 << 16;
        let mut decoder = Decoder::new(64, code, DecoderOptions::NONE);
        // The call of this function has pushed the return address.
        let mut bytes = WORD;
        let mut saves_frame_pointer = false;
        while decoder.can_decode() {
            let instruction = decoder.decode();
            match instruction.flow_control() {
                FlowControl::Next => {}
                FlowControl::Call | FlowControl::IndirectCall => {
                    let words = bytes / WORD;
                    return (bytes % WORD == 0).then_some(Self {
                        words,
                        saves_frame_pointer,
                    });
                }
                _ => return None,
            }
            let is_written = |register| {
                let first = (instruction.op0_kind(), instruction.op0_register());
                let reads = matches!(instruction.code(), Code::Push_r64);
                first == (OpKind::Register, register) && !reads
            };
            if instruction.code() == Code::Push_r64
                && instruction.op0_register() == Register::RBP
                && bytes == WORD
            {
                saves_frame_pointer = true;
            }
            if is_written(Register::RBP) && !saves_frame_pointer {
                return None;
            }
            let more = match is_written(Register::RSP) {
                true => taken(&instruction)?,
                false => -instruction.stack_pointer_increment(),
            };
            bytes = bytes
                .checked_add(more)
                .filter(|bytes| (WORD..MAX_BYTES).contains(bytes))?;
        }
        None
    }
}

/// Whether a function begins by saving the caller's frame pointer and setting its own.
pub(crate) fn sets_frame_pointer(code: &[u8]) -> bool {
    let mut decoder = Decoder::new(64, code, DecoderOptions::NONE);
    let (first, second) = (decoder.decode(), decoder.decode());
    let operands = (second.op0_register(), second.op1_register());
    first.code() == Code::Push_r64
        && first.op0_register() == Register::RBP
        && second.mnemonic() == Mnemonic::Mov
        && operands == (Register::RBP, Register::RSP)
}

/// Returns the bytes of stack that an instruction takes which writes the stack pointer; None if it does not tell.
fn taken(instruction: &Instruction) -> Option<i32> {
    let immediate = || i32::try_from(instruction.immediate(1) as i64).ok();
    match instruction.code() {
        Code::Sub_rm64_imm8 | Code::Sub_rm64_imm32 => immediate(),
        Code::Add_rm64_imm8 | Code::Add_rm64_imm32 => immediate()?.checked_neg(),
        Code::Lea_r64_m
            if instruction.memory_base() == Register::RSP
                && instruction.memory_index() == Register::None =>
        {
            i32::try_from(instruction.memory_displacement64() as i64)
                .ok()?
                .checked_neg()
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_pointers_that_are_set() {
        assert!(sets_frame_pointer(&[0x55, 0x48, 0x89, 0xe5]));
        // push %rbp; mov %rsp,%rbx
        assert!(!sets_frame_pointer(&[0x55, 0x48, 0x89, 0xe3]));
        // mov %rsp,%rbp
        assert!(!sets_frame_pointer(&[0x48, 0x89, 0xe5]));
    }

    #[test]
    fn frames_at_the_first_call() {
        let call = [0xe8, 0, 0, 0, 0];
        let frame = |code: &[u8]| {
            FrameAtCall::of(&[code, &call].concat())
                .map(|frame| (frame.words, frame.saves_frame_pointer))
        };
        assert_eq!(frame(&[]), Some((1, false)));
        // push %rbp; mov %rsp,%rbp; sub $0x30,%rsp; lea 0x28(%rsp),%rbp; sub $0x18,%rsp
        let saved = [
            0x55, 0x48, 0x89, 0xe5, 0x48, 0x83, 0xec, 0x30, 0x48, 0x8d, 0x6c, 0x24, 0x28, 0x48,
            0x83, 0xec, 0x18,
        ];
        assert_eq!(frame(&saved), Some((11, true)));
        // pushf; cld; lea -0xe0(%rsp),%rsp; mov %rbp,0x28(%rsp); push %rbx
        let kept = [
            0x9c, 0xfc, 0x48, 0x8d, 0xa4, 0x24, 0x20, 0xff, 0xff, 0xff, 0x48, 0x89, 0x6c, 0x24,
            0x28, 0x53,
        ];
        assert_eq!(frame(&kept), Some((31, false)));
        // The frame pointer is lost, the stack pointer is unknown, code jumps, or there is no call.
        assert_eq!(frame(&[0x48, 0x89, 0xe5]), None);
        assert_eq!(frame(&[0x48, 0x89, 0xc4]), None);
        assert_eq!(frame(&[0x74, 0x00]), None);
        assert_eq!(FrameAtCall::of(&saved), None);
    }
}
