//! The instructions with which a function of x86-64 begins, and which of them a uprobe may be on.
//!
//! # Long nops
//!
//! No probe is ever placed on a `nop` of five bytes or more where the kernel may turn such a `nop` into a call of a
//! page of its own (`arch_uprobe_optimize`, from 6.18 on). Forked children inherit the call, but not the page: on
//! 6.18.44 each child that a target forked after some hits, and that reached the probe, died of SIGSEGV. The call
//! would only save a trap. Functions built to be patched (`-mfentry`, `-fpatchable-function-entry`) begin with such a
//! `nop`, and are probed behind it. If they have a jump to that place, they are not probed at all.

use std::sync::LazyLock;

use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic,
    Register, UsedMemory,
};

use super::register_contents::{RegisterContents, writes};
use crate::bpf::kernel_support;
use crate::code::probe_point::ProbePoint;

/// How far from the entry a probe may go. jemalloc's `free` has its first jump 48 bytes on.
pub(crate) const MAX_OFFSET: u64 = 128;

/// Registers that unwinding the stack begins with.
const FRAME_REGISTERS: [Register; 2] = [Register::RSP, Register::RBP];

/// Bytes of the shortest `nop` that a kernel turns into a call: 5 in 6.18, 10 later.
const LONG_NOP_BYTES: usize = 5;

/// Whether the kernel turns a long `nop` under a probe into a call: 6.18 and later. The second name is that of the
/// system call that this call makes.
pub(crate) static CHANGES_NOPS: LazyLock<bool> = LazyLock::new(|| {
    ["arch_uprobe_optimize", "__x64_sys_uprobe"]
        .iter()
        .any(|name| kernel_support::btf_has_name(name))
});

/// Returns the entry of the function that begins with this code, or the first instruction behind the nops that no
/// probe may be on. Returns None if these nops do not end within `head`.
pub(crate) fn nearest(head: &[u8], changes_nops: bool) -> Option<ProbePoint> {
    let decoder = Decoder::with_ip(64, head, 0, DecoderOptions::NONE);
    let mut instructions = decoder.into_iter();
    let first = instructions.find(|instruction| !changes_nops || !is_long_nop(instruction));
    let offset = match first {
        Some(first) => first.ip(),
        None if head.is_empty() => 0,
        None => return None,
    };
    Some(ProbePoint {
        offset,
        ..ProbePoint::ENTRY
    })
}

/// Returns the first cheap place, as far as a function's own code tells.
pub(crate) fn candidate(code: &[u8], arguments: &[u8]) -> Option<ProbePoint> {
    let mut information = InstructionInfoFactory::new();
    let mut held = RegisterContents::at_entry();
    let mut decoder = Decoder::with_ip(64, code, 0, DecoderOptions::NONE);
    while decoder.can_decode() {
        let instruction = decoder.decode();
        if instruction.is_invalid() || instruction.ip() > MAX_OFFSET {
            break;
        }
        if is_emulated(&instruction)
            && let Some(held_by) = held.held_by(arguments)
        {
            return Some(ProbePoint {
                offset: instruction.ip(),
                held_by,
            });
        }
        let goes_on = instruction.flow_control() == FlowControl::Next;
        if !goes_on || !spares_the_frame(&mut information, &instruction) {
            break;
        }
        held = held.after(&mut information, &instruction);
    }
    None
}

/// Whether an instruction leaves the stack and its registers as they are.
fn spares_the_frame(information: &mut InstructionInfoFactory, instruction: &Instruction) -> bool {
    let info = information.info(instruction);
    let mut registers = info.used_registers().iter();
    // The return address is in memory.
    let mut memory = info.used_memory().iter();
    !registers.any(|used| {
        writes(used.access()) && FRAME_REGISTERS.contains(&used.register().full_register())
    }) && memory.all(|used| !writes(used.access()) || spares_the_stack(used))
}

/// Whether memory is a variable of the file's own: no register but the instruction pointer is part of the address.
fn spares_the_stack(used: &UsedMemory) -> bool {
    used.base() == Register::None && used.index() == Register::None || used.base() == Register::RIP
}

/// Whether kernels from 5.10 on emulate an instruction: `push` of a register, `nop` of one byte, and direct jumps
/// (arch/x86/kernel/uprobes.c). They emulate direct calls too, which no function begins with.
fn is_emulated(instruction: &Instruction) -> bool {
    match instruction.mnemonic() {
        Mnemonic::Push => {
            let plain = if instruction.op0_register().number() < 8 {
                1
            } else {
                2
            };
            instruction.code() == Code::Push_r64 && instruction.len() == plain
        }
        Mnemonic::Nop => instruction.len() == 1,
        _ => is_emulated_jump(instruction),
    }
}

/// Whether the instruction is a direct jump, which kernels from 5.10 on emulate.
pub(crate) fn is_emulated_jump(instruction: &Instruction) -> bool {
    instruction.is_jcc_short_or_near() || instruction.is_jmp_short_or_near()
}

/// Whether an instruction is a `nop` that a kernel can turn into a call.
fn is_long_nop(instruction: &Instruction) -> bool {
    instruction.mnemonic() == Mnemonic::Nop && instruction.len() >= LONG_NOP_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    const RET: u8 = 0xc3;

    /// Returns the offset of the probe in a function whose handler reads all arguments.
    fn offset_of(code: &[&[u8]]) -> u64 {
        place_of(code, &[1, 2, 3, 4, 5, 6]).offset
    }

    fn place_of(code: &[&[u8]], arguments: &[u8]) -> ProbePoint {
        let code = [&code.concat()[..], &[RET]].concat();
        candidate(&code, arguments).unwrap_or(ProbePoint::ENTRY)
    }

    const PUSH_RBP: &[u8] = &[0x55];
    const PUSH_R12: &[u8] = &[0x41, 0x54];
    const TEST_RDI: &[u8] = &[0x48, 0x85, 0xff];
    const JE_2: &[u8] = &[0x74, 0x02];
    const ENDBR64: &[u8] = &[0xf3, 0x0f, 0x1e, 0xfa];
    const MOV_RDI_TO_RAX: &[u8] = &[0x48, 0x89, 0xf8];
    const MOV_RAX_TO_RDI: &[u8] = &[0x48, 0x89, 0xc7];
    const MOV_RDI_TO_RSI: &[u8] = &[0x48, 0x89, 0xfe];
    const MOV_EDI_TO_ESI: &[u8] = &[0x89, 0xfe];
    const XOR_EDI: &[u8] = &[0x31, 0xff];
    const XOR_ESI: &[u8] = &[0x31, 0xf6];
    const SUB_RSP: &[u8] = &[0x48, 0x83, 0xec, 0x18];
    const MOV_RDI_TO_STACK: &[u8] = &[0x48, 0x89, 0x3c, 0x24];
    const MOV_RDI_TO_VARIABLE: &[u8] = &[0x48, 0x89, 0x3d, 0x00, 0x10, 0x00, 0x00];
    const NOP: &[u8] = &[0x90];
    const LONG_NOP: &[u8] = &[0x0f, 0x1f, 0x40, 0x00];
    const NOP5: &[u8] = &[0x0f, 0x1f, 0x44, 0x00, 0x00];

    #[test]
    fn an_entry_that_can_be_emulated_is_kept() {
        assert_eq!(offset_of(&[PUSH_RBP, TEST_RDI]), 0);
        assert_eq!(offset_of(&[PUSH_R12, PUSH_RBP]), 0);
        assert_eq!(offset_of(&[NOP]), 0);
    }

    #[test]
    fn glibcs_free_is_probed_at_its_jump() {
        assert_eq!(offset_of(&[TEST_RDI, JE_2, NOP, NOP]), 3);
    }

    #[test]
    fn protected_code_is_probed_behind_its_landing_pad() {
        assert_eq!(offset_of(&[ENDBR64, PUSH_RBP]), 4);
        assert_eq!(offset_of(&[ENDBR64, TEST_RDI, JE_2, NOP, NOP]), 7);
        assert_eq!(offset_of(&[LONG_NOP, PUSH_RBP]), 4);
    }

    #[test]
    fn what_a_handler_reads_must_not_be_lost() {
        assert_eq!(offset_of(&[MOV_RDI_TO_RAX, PUSH_RBP]), 3);
        for changes in [MOV_RAX_TO_RDI, XOR_ESI, SUB_RSP, MOV_RDI_TO_STACK] {
            assert_eq!(offset_of(&[changes, PUSH_RBP]), 0, "{changes:x?}");
        }
        // pop %rax: the stack pointer.
        assert_eq!(offset_of(&[&[0x58], PUSH_RBP]), 0);
        // A call can change any register.
        assert_eq!(offset_of(&[&[0xe8, 0, 0, 0, 0], PUSH_RBP]), 0);
        // A variable is not the stack.
        assert_eq!(offset_of(&[MOV_RDI_TO_VARIABLE, PUSH_RBP]), 7);
    }

    #[test]
    fn what_it_does_not_read_may_be_lost() {
        assert_eq!(place_of(&[XOR_ESI, PUSH_RBP], &[1]).offset, 2);
        assert_eq!(place_of(&[XOR_ESI, PUSH_RBP], &[1, 2]), ProbePoint::ENTRY);
        assert_eq!(place_of(&[SUB_RSP, PUSH_RBP], &[]), ProbePoint::ENTRY);
    }

    #[test]
    fn an_argument_may_be_in_another_ones_register() {
        let place = place_of(&[MOV_RDI_TO_RSI, XOR_EDI, PUSH_RBP], &[1]);
        assert_eq!((place.offset, place.register_of(1)), (5, 2));
        // The argument's own register comes first, as long as it holds the argument.
        let place = place_of(&[MOV_RDI_TO_RSI, TEST_RDI, JE_2], &[1]);
        assert_eq!((place.offset, place.register_of(1)), (6, 1));
        // Half of an argument is no copy.
        let place = place_of(&[MOV_EDI_TO_ESI, XOR_EDI, PUSH_RBP], &[1]);
        assert_eq!(place, ProbePoint::ENTRY);
        assert_eq!(
            place_of(&[MOV_RDI_TO_RSI, XOR_EDI, XOR_ESI, PUSH_RBP], &[1]),
            ProbePoint::ENTRY
        );
        // The second argument is lost.
        let place = place_of(&[MOV_RDI_TO_RSI, XOR_EDI, PUSH_RBP], &[1, 2]);
        assert_eq!(place, ProbePoint::ENTRY);
    }

    #[test]
    fn no_probe_is_on_a_nop_that_the_kernel_changes() {
        let nearest_in = |code: &[&[u8]], changes_nops| {
            let place = nearest(&code.concat(), changes_nops);
            place.map(|place| place.offset)
        };
        const NOP10: &[u8] = &[0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0];
        assert_eq!(nearest_in(&[NOP5, SUB_RSP], false), Some(0));
        assert_eq!(nearest_in(&[NOP5, SUB_RSP], true), Some(5));
        assert_eq!(nearest_in(&[NOP10, NOP5, SUB_RSP], true), Some(15));
        assert_eq!(nearest_in(&[ENDBR64, NOP5, SUB_RSP], true), Some(0));
        assert_eq!(nearest_in(&[NOP, SUB_RSP], true), Some(0));
        assert_eq!(nearest_in(&[LONG_NOP, SUB_RSP], true), Some(0));
        assert_eq!(nearest_in(&[NOP5, NOP5], true), None);
        assert_eq!(offset_of(&[NOP5, PUSH_RBP]), 5);
        assert_eq!(offset_of(&[ENDBR64, NOP5, PUSH_RBP]), 9);
    }

    #[test]
    fn pushes_that_are_not_emulated() {
        // pushw %bp; push $1
        assert_eq!(offset_of(&[&[0x66, 0x55]]), 0);
        assert_eq!(offset_of(&[TEST_RDI, &[0x6a, 0x01], PUSH_RBP]), 0);
    }

    #[test]
    fn no_code_and_code_that_does_not_decode() {
        assert_eq!(candidate(&[], &[1]), None);
        assert_eq!(candidate(&[0x06], &[1]), None);
        assert_eq!(nearest(&[], true), Some(ProbePoint::ENTRY));
        assert_eq!(nearest(&[0x06], true), Some(ProbePoint::ENTRY));
        assert_eq!(offset_of(&[TEST_RDI, &[0x06]]), 0);
    }
}
