//! Where in a function a uprobe costs least.
//!
//! A uprobe replaces an instruction by a breakpoint. If the kernel can emulate that instruction, a
//! hit costs one trap; else it lets the process execute the instruction elsewhere, in a single
//! step, which costs a second trap. On the machine that this was measured on that is 0.8 µs
//! against 13 µs. glibc's `free` begins with `test %rdi,%rdi; je`, which is of the dear kind, and
//! code built for control-flow protection begins with `endbr64`, which is too.
//!
//! So the probe goes to the first instruction that can be emulated, if until there nothing that a
//! handler reads at a function's entry has been lost: arguments, stack pointer, frame pointer,
//! return address; and if nothing but the entry leads there. Else it stays at the entry. An
//! argument may have been copied to another argument's register before its own is used for
//! something else, as mimalloc's `malloc` does; then that is where the handler has to read it.
//!
//! # Long nops
//!
//! No probe is ever placed on a `nop` of five bytes or more where the kernel may turn one into a
//! call of a page of its own (`arch_uprobe_optimize`, from 6.18 on). Forked children inherit the
//! call, but not the page: on 6.18.44 each child that a target forked after some hits, and that
//! reached the probe, died of SIGSEGV. The call would save a trap; nothing is lost that counts.
//! Functions built to be patched (`-mfentry`, `-fpatchable-function-entry`) begin with such a `nop`
//! and are probed behind it; those that have a jump to there are not probed at all.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::LazyLock;

use anyhow::{Context, Result};
use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic,
    OpAccess, OpKind, Register, UsedMemory,
};
use memchr::memchr3_iter;

use crate::bpf::kernel_support;
use crate::code::elf::{self, CodeSegment, Function};

/// How far from the entry a probe may go. jemalloc's `free` has its first jump 48 bytes on.
const MAX_OFFSET: u64 = 128;
/// What a jump of two bytes reaches, before and behind it.
const SHORT_REACH: u64 = 128 + 2;
/// Bytes of code that are searched at once for jumps, and how many of them once more with the next.
const PIECE: (usize, usize) = (256 << 10, FAR_JUMP - 1);
/// The longest jump with four bytes of distance: two of opcode.
const FAR_JUMP: usize = 6;

/// The registers of the arguments from the first on.
const ARGUMENT_REGISTERS: [Register; 6] = [
    Register::RDI,
    Register::RSI,
    Register::RDX,
    Register::RCX,
    Register::R8,
    Register::R9,
];

/// What unwinding the stack begins with.
const FRAME_REGISTERS: [Register; 2] = [Register::RSP, Register::RBP];

/// The shortest `nop` that a kernel makes a call: 5 bytes in 6.18, 10 later.
const LONG_NOP_BYTES: usize = 5;
/// Bytes at a function's entry that are searched for the end of its nops.
const HEAD: usize = 64;

/// Whether the kernel makes a long `nop` under a probe a call: 6.18 and later. The second name is
/// of the system call behind it.
static CHANGES_NOPS: LazyLock<bool> = LazyLock::new(|| {
    ["arch_uprobe_optimize", "__x64_sys_uprobe"]
        .iter()
        .any(|name| kernel_support::btf_has_name(name))
});

/// Where in a function a probe is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wish {
    /// Where it costs least.
    Cheap,
    /// At the entry, or as near behind it as is safe.
    Entry,
}

/// The instruction of a function to probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The instruction's offset from the entry, in bytes.
    pub offset: u64,
    held_by: [u8; ARGUMENT_REGISTERS.len()],
}

impl Place {
    /// Where all is as it should be.
    pub const ENTRY: Self = Self {
        offset: 0,
        held_by: [1, 2, 3, 4, 5, 6],
    };

    /// The number of the argument whose register holds this argument there. Numbers begin with 1.
    pub fn register_of(&self, argument: u8) -> u8 {
        let index = usize::from(argument).wrapping_sub(1);
        self.held_by.get(index).copied().unwrap_or(argument)
    }
}

/// The places to probe functions of a file at, each given with the numbers of the arguments that
/// its handler reads. None where no place is safe for the target.
pub fn places(
    file: &File,
    functions: &[(&Function, Vec<u8>)],
    wish: Wish,
) -> Result<Vec<Option<Place>>> {
    let segments = elf::code_segments(file)?;
    let entries: Vec<Option<u64>> = functions
        .iter()
        .map(|(function, _)| elf::address(&segments, function.file_offset))
        .collect();
    let (mut nearest_places, mut places) = (Vec::new(), Vec::new());
    for ((function, arguments), entry) in functions.iter().zip(&entries) {
        let mut head = [0; HEAD];
        let length = file
            .read_at(&mut head, function.file_offset)
            .with_context(|| format!("failed to read the code of {}", function.name))?;
        let code = function.code(file)?;
        // Where the jumps to it are is not known: no place but the entry will do.
        let unknown = entry.is_none() || jumps_anywhere(&code);
        let nearest = nearest(&head[..length], *CHANGES_NOPS);
        let nearest = nearest.filter(|place| place.offset == 0 || !unknown);
        let best = match wish {
            Wish::Cheap if !unknown => candidate(&code, arguments),
            _ => None,
        };
        nearest_places.push(nearest);
        places.push(best.or(nearest));
    }
    let mut unchecked = places.clone();
    loop {
        let wrong = led_into(file, &segments, &entries, &unchecked)?;
        if wrong.is_empty() {
            return Ok(places);
        }
        unchecked.fill(None);
        for index in wrong {
            let next = next_place(places[index], nearest_places[index]);
            (places[index], unchecked[index]) = (next, next);
        }
    }
}

/// The place to try when a jump leads behind the entry up to `wrong`: the nearest to the entry, and
/// none after that.
fn next_place(wrong: Option<Place>, nearest: Option<Place>) -> Option<Place> {
    nearest.filter(|nearest| wrong.is_some_and(|wrong| nearest.offset < wrong.offset))
}

/// The functions with a jump that leads behind the entry, up to and including the probe; each once.
fn led_into(
    file: &File,
    segments: &[CodeSegment],
    entries: &[Option<u64>],
    places: &[Option<Place>],
) -> Result<Vec<usize>> {
    let mut windows: Vec<(Range<u64>, usize)> = places
        .iter()
        .zip(entries)
        .enumerate()
        .filter_map(|(index, (place, entry))| {
            let (entry, offset) = ((*entry)?, (*place)?.offset);
            (offset > 0).then_some((entry + 1..entry + offset + 1, index))
        })
        .collect();
    windows.sort_by_key(|(window, _)| window.start);
    jumped_into(file, segments, &windows)
}

/// The entry of the function that begins with this code, or the first instruction behind the nops
/// that no probe may be on. None if the nops do not end.
fn nearest(head: &[u8], changes_nops: bool) -> Option<Place> {
    let decoder = Decoder::with_ip(64, head, 0, DecoderOptions::NONE);
    let mut instructions = decoder.into_iter();
    let first = instructions.find(|instruction| !changes_nops || !is_long_nop(instruction));
    let offset = match first {
        Some(first) => first.ip(),
        None if head.is_empty() => 0,
        None => return None,
    };
    Some(Place {
        offset,
        ..Place::ENTRY
    })
}

/// The first place that is cheap, as far as a function's own code tells.
fn candidate(code: &[u8], arguments: &[u8]) -> Option<Place> {
    let mut information = InstructionInfoFactory::new();
    let mut held = Held::at_entry();
    let mut decoder = Decoder::with_ip(64, code, 0, DecoderOptions::NONE);
    while decoder.can_decode() {
        let instruction = decoder.decode();
        if instruction.is_invalid() || instruction.ip() > MAX_OFFSET {
            break;
        }
        if is_emulated(&instruction)
            && let Some(held_by) = held.held_by(arguments)
        {
            return Some(Place {
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

/// What registers hold, by their numbers in the instruction set: the number of the argument whose
/// value it was at entry, or something else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Held([Option<u8>; 16]);

impl Held {
    pub(crate) fn at_entry() -> Self {
        let mut held = Self([None; 16]);
        for (register, argument) in ARGUMENT_REGISTERS.iter().zip(1..) {
            held.0[register.number()] = Some(argument);
        }
        held
    }

    /// What the register of this argument holds.
    pub(crate) fn in_register_of(&self, argument: u8) -> Option<u8> {
        let index = usize::from(argument.checked_sub(1)?);
        self.0[ARGUMENT_REGISTERS.get(index)?.number()]
    }

    /// Where each of these arguments is; None if one of them is in no argument's register.
    fn held_by(&self, arguments: &[u8]) -> Option<[u8; ARGUMENT_REGISTERS.len()]> {
        let mut held_by = Place::ENTRY.held_by;
        for &argument in arguments {
            // Its own register, if it is still there.
            let holder = [argument, 1, 2, 3, 4, 5, 6]
                .into_iter()
                .find(|&holder| self.in_register_of(holder) == Some(argument))?;
            *held_by.get_mut(usize::from(argument) - 1)? = holder;
        }
        Some(held_by)
    }

    /// Follows one instruction.
    pub(crate) fn after(
        mut self,
        information: &mut InstructionInfoFactory,
        instruction: &Instruction,
    ) -> Self {
        let copies = instruction.mnemonic() == Mnemonic::Mov
            && instruction.op0_kind() == OpKind::Register
            && instruction.op1_kind() == OpKind::Register
            && instruction.op0_register().is_gpr64();
        let source = copies.then(|| instruction.op1_register());
        let source = source.and_then(|source| self.0[source.number()]);
        for used in information.info(instruction).used_registers() {
            if writes(used.access()) && used.register().is_gpr() {
                self.0[used.register().full_register().number()] = source;
            }
        }
        self
    }

    /// Follows a call, which leaves some registers as they are.
    pub(crate) fn after_call(mut self) -> Self {
        const KEPT: [Register; 6] = [
            Register::RBX,
            Register::RBP,
            Register::R12,
            Register::R13,
            Register::R14,
            Register::R15,
        ];
        for (number, held) in self.0.iter_mut().enumerate() {
            if !KEPT.iter().any(|register| register.number() == number) {
                *held = None;
            }
        }
        self
    }
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

/// Whether an instruction that uses a register or memory in this way may change it.
pub(crate) fn writes(access: OpAccess) -> bool {
    !matches!(
        access,
        OpAccess::None | OpAccess::Read | OpAccess::CondRead | OpAccess::NoMemAccess
    )
}

/// Whether it is a variable of the file's own: no register has a part in the address.
fn spares_the_stack(used: &UsedMemory) -> bool {
    used.base() == Register::None && used.index() == Register::None || used.base() == Register::RIP
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

/// Whether it is a `nop` that a kernel can make a call.
fn is_long_nop(instruction: &Instruction) -> bool {
    instruction.mnemonic() == Mnemonic::Nop && instruction.len() >= LONG_NOP_BYTES
}

/// Whether a function has a jump through a table or a register, whose targets are not in the code.
/// One through a variable of the file's own goes to another function.
fn jumps_anywhere(code: &[u8]) -> bool {
    let decoder = Decoder::with_ip(64, code, 0, DecoderOptions::NONE);
    decoder.into_iter().any(|instruction| {
        instruction.flow_control() == FlowControl::IndirectBranch
            && !(instruction.op0_kind() == OpKind::Memory
                && instruction.memory_base() == Register::RIP)
    })
}

/// Which of `windows` a direct jump leads into, from anywhere in the file: a function's cold
/// part is elsewhere and comes back, and functions written by hand share their ends. However many
/// jumps lead into a window, its index is there once.
fn jumped_into(
    file: &File,
    segments: &[CodeSegment],
    windows: &[(Range<u64>, usize)],
) -> Result<Vec<usize>> {
    let (Some((first, _)), Some((last, _))) = (windows.first(), windows.last()) else {
        return Ok(Vec::new());
    };
    let all = first.start..last.end;
    let mut hit = Vec::new();
    let mut mark = |target: u64| {
        if all.contains(&target) {
            let before = windows.partition_point(|(window, _)| window.start <= target);
            let near = windows[..before].iter().rev();
            let near = near.take_while(|(window, _)| window.start + MAX_OFFSET >= target);
            hit.extend(
                near.filter(|(window, _)| window.contains(&target))
                    .map(|(_, index)| *index),
            );
        }
    };
    for segment in segments {
        segment.read(file, PIECE, |address, bytes| {
            far_targets(address, bytes, &mut mark);
        })?;
        for (window, _) in windows {
            let from = window
                .start
                .saturating_sub(SHORT_REACH)
                .max(segment.address);
            let to = (window.end + SHORT_REACH).min(segment.address + segment.size);
            if from < to {
                let mut bytes = vec![0; (to - from) as usize];
                file.read_exact_at(&mut bytes, segment.file_offset + from - segment.address)
                    .context("failed to read code")?;
                short_targets(from, &bytes, &mut mark);
            }
        }
    }
    hit.sort_unstable();
    hit.dedup();
    Ok(hit)
}

/// Where the jumps and calls with four bytes of distance lead. Whatever looks like one is taken for
/// one, be it in the middle of another instruction: a distance that leads just here by accident is
/// one in a hundred million.
fn far_targets(address: u64, bytes: &[u8], mark: &mut impl FnMut(u64)) {
    for at in memchr3_iter(0xe8, 0xe9, 0x0f, bytes) {
        let opcode = match bytes[at..] {
            [0x0f, 0x80..=0x8f, ..] => 2,
            [0x0f, ..] => continue,
            _ => 1,
        };
        if let Some(distance) = bytes[at + opcode..].first_chunk() {
            let next = address + (at + opcode + distance.len()) as u64;
            mark(next.wrapping_add_signed(i32::from_le_bytes(*distance).into()));
        }
    }
}

/// Where the jumps with one byte of distance lead. Where instructions begin is not known outside of
/// a function, so all beginnings are tried: after a few instructions they agree.
fn short_targets(address: u64, bytes: &[u8], mark: &mut impl FnMut(u64)) {
    const LONGEST: usize = 15;
    for start in 0..LONGEST.min(bytes.len()) {
        let from = address + start as u64;
        let decoder = Decoder::with_ip(64, &bytes[start..], from, DecoderOptions::NONE);
        for instruction in decoder {
            if instruction.op0_kind() == OpKind::NearBranch64 && instruction.len() <= 3 {
                mark(instruction.near_branch_target());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RET: u8 = 0xc3;

    /// The offset of a probe of a function that reads all its arguments.
    fn offset_of(code: &[&[u8]]) -> u64 {
        place_of(code, &[1, 2, 3, 4, 5, 6]).offset
    }

    fn place_of(code: &[&[u8]], arguments: &[u8]) -> Place {
        let code = [&code.concat()[..], &[RET]].concat();
        candidate(&code, arguments).unwrap_or(Place::ENTRY)
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
        // A call comes back with anything.
        assert_eq!(offset_of(&[&[0xe8, 0, 0, 0, 0], PUSH_RBP]), 0);
        // A variable is not the stack.
        assert_eq!(offset_of(&[MOV_RDI_TO_VARIABLE, PUSH_RBP]), 7);
    }

    #[test]
    fn what_it_does_not_read_may_be_lost() {
        assert_eq!(place_of(&[XOR_ESI, PUSH_RBP], &[1]).offset, 2);
        assert_eq!(place_of(&[XOR_ESI, PUSH_RBP], &[1, 2]), Place::ENTRY);
        assert_eq!(place_of(&[SUB_RSP, PUSH_RBP], &[]), Place::ENTRY);
    }

    #[test]
    fn an_argument_may_be_in_another_ones_register() {
        let place = place_of(&[MOV_RDI_TO_RSI, XOR_EDI, PUSH_RBP], &[1]);
        assert_eq!((place.offset, place.register_of(1)), (5, 2));
        // Its own register, as long as it is there.
        let place = place_of(&[MOV_RDI_TO_RSI, TEST_RDI, JE_2], &[1]);
        assert_eq!((place.offset, place.register_of(1)), (6, 1));
        // Half of it is no copy.
        let place = place_of(&[MOV_EDI_TO_ESI, XOR_EDI, PUSH_RBP], &[1]);
        assert_eq!(place, Place::ENTRY);
        assert_eq!(
            place_of(&[MOV_RDI_TO_RSI, XOR_EDI, XOR_ESI, PUSH_RBP], &[1]),
            Place::ENTRY
        );
        // What was the second argument is lost.
        let place = place_of(&[MOV_RDI_TO_RSI, XOR_EDI, PUSH_RBP], &[1, 2]);
        assert_eq!(place, Place::ENTRY);
    }

    #[test]
    fn jumps_without_a_target_could_lead_anywhere() {
        // jmp *%rax
        assert!(jumps_anywhere(&[TEST_RDI, JE_2, &[0xff, 0xe0]].concat()));
        // jmp *0x1000(%rip)
        assert!(!jumps_anywhere(
            &[TEST_RDI, JE_2, &[0xff, 0x25, 0, 0x10, 0, 0]].concat()
        ));
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
    fn jumps_are_found_wherever_they_are() {
        let targets = |code: &[u8]| {
            let mut targets = Vec::new();
            far_targets(0x1000, code, &mut |target| targets.push(target));
            short_targets(0x1000, code, &mut |target| targets.push(target));
            targets.sort_unstable();
            targets.dedup();
            targets
        };
        // test %rdi,%rdi; je +2; jmp back to the je
        assert_eq!(
            targets(&[TEST_RDI, JE_2, &[0xeb, 0xfc]].concat()),
            [0x1003, 0x1007]
        );
        // nop; jne -6; nop; jmp +0x100; nop; call -6
        let far = [
            &[
                0x90, 0x0f, 0x85, 0xfa, 0xff, 0xff, 0xff, 0x90, 0xe9, 0, 1, 0, 0,
            ][..],
            &[0x90, 0xe8, 0xfa, 0xff, 0xff, 0xff],
        ];
        assert_eq!(targets(&far.concat()), [0x1001, 0x100d, 0x110d]);
    }

    #[test]
    fn many_jumps_into_a_function_lead_into_it_once() {
        use std::io::Write;

        // jmp to the second byte, three times.
        let code = [0xeb, 0xff, 0xeb, 0xfd, 0xeb, 0xfb];
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(&code).expect("room");
        let segment = CodeSegment {
            address: 0x1000,
            file_offset: 0,
            size: code.len() as u64,
        };
        let hit = jumped_into(&file, &[segment], &[(0x1001..0x1003, 7)]);
        assert_eq!(hit.expect("a read"), [7]);
    }

    #[test]
    fn each_place_is_tried_once() {
        let at = |offset| {
            Some(Place {
                offset,
                ..Place::ENTRY
            })
        };
        assert_eq!(next_place(at(9), at(5)), at(5));
        assert_eq!(next_place(at(9), at(0)), at(0));
        assert_eq!(next_place(at(5), at(5)), None);
        assert_eq!(next_place(at(9), None), None);
        assert_eq!(next_place(None, at(5)), None);
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
        assert_eq!(nearest(&[], true), Some(Place::ENTRY));
        assert_eq!(nearest(&[0x06], true), Some(Place::ENTRY));
        assert_eq!(offset_of(&[TEST_RDI, &[0x06]]), 0);
    }
}
