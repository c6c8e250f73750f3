//! Where in a function a uprobe costs least.
//!
//! A uprobe replaces an instruction by a breakpoint. If the kernel can emulate that instruction, a
//! hit costs one trap; else it lets the process execute the instruction elsewhere, in a single
//! step, which costs a second trap. On the machine that this was measured on that is 0.8 µs
//! against 13 µs. glibc's `free` begins with `test %rdi,%rdi; je`, which is of the dear kind, and
//! code built for control-flow protection begins with `endbr64`, which is too.
//!
//! So the probe goes to the first instruction that can be emulated, if until there nothing that a
//! handler reads at a function's entry has changed: arguments, stack pointer, frame pointer, return
//! address; and if nothing but the entry leads there. Else it stays at the entry.

use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic,
    OpAccess, OpKind, Register,
};

/// How far from the entry a probe may go.
const MAX_OFFSET: u64 = 32;

/// What a handler at a function's entry relies on.
const READ_AT_ENTRY: [Register; 8] = [
    Register::RDI,
    Register::RSI,
    Register::RDX,
    Register::RCX,
    Register::R8,
    Register::R9,
    Register::RSP,
    Register::RBP,
];

/// The offset from the function's entry of the instruction to probe. `code` is the whole function,
/// as x86-64 code.
pub fn offset(code: &[u8]) -> u64 {
    let chosen = straight_line(code)
        .take_while(|instruction| instruction.ip() <= MAX_OFFSET)
        .find(is_emulated)
        .map_or(0, |instruction| instruction.ip());
    if chosen > 0 && !only_reached_from_entry(code, chosen) {
        return 0;
    }
    chosen
}

/// The instructions from the entry on, up to and including the first that may change what a
/// handler reads, or that does not always go on to the next.
fn straight_line(code: &[u8]) -> impl Iterator<Item = Instruction> {
    let mut information = InstructionInfoFactory::new();
    let mut over = false;
    let mut decoder = Decoder::with_ip(64, code, 0, DecoderOptions::NONE);
    std::iter::from_fn(move || {
        if over || !decoder.can_decode() {
            return None;
        }
        let instruction = decoder.decode();
        if instruction.is_invalid() {
            return None;
        }
        over = instruction.flow_control() != FlowControl::Next
            || !leaves_entry_state(&mut information, &instruction);
        Some(instruction)
    })
}

fn leaves_entry_state(information: &mut InstructionInfoFactory, instruction: &Instruction) -> bool {
    let writes = |access: OpAccess| {
        !matches!(
            access,
            OpAccess::None | OpAccess::Read | OpAccess::CondRead | OpAccess::NoMemAccess
        )
    };
    let info = information.info(instruction);
    let registers = info.used_registers().iter();
    let mut changed = registers
        .filter(|used| writes(used.access()))
        .map(|used| used.register());
    !changed.any(|register| READ_AT_ENTRY.contains(&register.full_register()))
        // The return address is in memory.
        && !info.used_memory().iter().any(|used| writes(used.access()))
}

/// Whether the kernels from 5.10 on emulate it: `push` of a register, `nop` of one byte, and direct
/// jumps (arch/x86/kernel/uprobes.c). They emulate direct calls too, which no function begins with.
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
        _ => {
            matches!(
                instruction.flow_control(),
                FlowControl::ConditionalBranch | FlowControl::UnconditionalBranch
            ) && (instruction.is_jcc_short_or_near() || instruction.is_jmp_short_or_near())
        }
    }
}

/// Whether no jump in the function leads past its entry, up to and including `chosen`.
fn only_reached_from_entry(code: &[u8], chosen: u64) -> bool {
    let decoder = Decoder::with_ip(64, code, 0, DecoderOptions::NONE);
    decoder.into_iter().all(|instruction| {
        let direct = matches!(
            instruction.op0_kind(),
            OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64
        );
        match instruction.flow_control() {
            // A jump through a table or register may lead anywhere.
            FlowControl::IndirectBranch => false,
            _ if direct => !(1..=chosen).contains(&instruction.near_branch_target()),
            _ => true,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RET: u8 = 0xc3;

    fn offset_of(code: &[&[u8]]) -> u64 {
        offset(&[&code.concat()[..], &[RET]].concat())
    }

    const PUSH_RBP: &[u8] = &[0x55];
    const PUSH_R12: &[u8] = &[0x41, 0x54];
    const TEST_RDI: &[u8] = &[0x48, 0x85, 0xff];
    const JE_2: &[u8] = &[0x74, 0x02];
    const ENDBR64: &[u8] = &[0xf3, 0x0f, 0x1e, 0xfa];
    const MOV_RDI_TO_RAX: &[u8] = &[0x48, 0x89, 0xf8];
    const MOV_RAX_TO_RDI: &[u8] = &[0x48, 0x89, 0xc7];
    const XOR_ESI: &[u8] = &[0x31, 0xf6];
    const SUB_RSP: &[u8] = &[0x48, 0x83, 0xec, 0x18];
    const MOV_RDI_TO_STACK: &[u8] = &[0x48, 0x89, 0x3c, 0x24];
    const NOP: &[u8] = &[0x90];
    const LONG_NOP: &[u8] = &[0x0f, 0x1f, 0x40, 0x00];

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
    fn what_a_handler_reads_must_not_have_changed() {
        assert_eq!(offset_of(&[MOV_RDI_TO_RAX, PUSH_RBP]), 3);
        for changes in [MOV_RAX_TO_RDI, XOR_ESI, SUB_RSP, MOV_RDI_TO_STACK] {
            assert_eq!(offset_of(&[changes, PUSH_RBP]), 0, "{changes:x?}");
        }
        // pop %rax: the stack pointer.
        assert_eq!(offset_of(&[&[0x58], PUSH_RBP]), 0);
        // A call comes back with anything.
        assert_eq!(offset_of(&[&[0xe8, 0, 0, 0, 0], PUSH_RBP]), 0);
    }

    #[test]
    fn a_place_that_a_loop_comes_back_to_is_not_taken() {
        // test %rdi,%rdi; je +2; jmp back to the je
        assert_eq!(offset_of(&[TEST_RDI, JE_2, &[0xeb, 0xfc]]), 0);
        // jmp *%rax could lead anywhere.
        assert_eq!(offset_of(&[TEST_RDI, JE_2, &[0xff, 0xe0]]), 0);
        // A loop over the whole function enters it again at its entry.
        assert_eq!(offset_of(&[TEST_RDI, JE_2, &[0xeb, 0xf9]]), 3);
    }

    #[test]
    fn pushes_that_are_not_emulated() {
        // pushw %bp; push $1
        assert_eq!(offset_of(&[&[0x66, 0x55]]), 0);
        assert_eq!(offset_of(&[TEST_RDI, &[0x6a, 0x01], PUSH_RBP]), 0);
    }

    #[test]
    fn no_code_and_code_that_does_not_decode() {
        assert_eq!(offset(&[]), 0);
        assert_eq!(offset(&[0x06]), 0);
        assert_eq!(offset(&[0x48, 0x85, 0xff, 0x06]), 0);
    }
}
