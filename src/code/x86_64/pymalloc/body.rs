//! Instructions of one function, and the copies of pymalloc among them.

use std::collections::HashSet;
use std::ops::Range;

use iced_x86::{
    Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpKind,
    Register,
};

use super::SlotOp;
use crate::code::arch::entry::{MAX_OFFSET, is_emulated_jump};
use crate::code::arch::register_contents::writes;

/// Offset of `freeblock` in a pool's header.
const FREE_BLOCK: u64 = 8;
/// Mask that turns an address in a pool of 16 KiB into the address of the pool.
const POOL_MASK: i64 = -(16 << 10);
/// Number of instructions before and behind a change of the count among which the rest of a copy is searched.
const REACH: usize = 24;

/// Instructions of a function.
pub(super) struct Body {
    /// Addresses of the function.
    pub(super) range: Range<u64>,
    pub(super) instructions: Vec<Instruction>,
}

/// Copy of pymalloc in a function. Instructions are given by their index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct InlinedPymalloc {
    pub(super) moves: SlotOp,
    /// Register with the address of the pool's header.
    pub(super) pool: Register,
    /// Instruction that changes the count.
    pub(super) change: usize,
    /// Instruction that loads `freeblock`.
    load: usize,
    /// Instruction that stores `freeblock`.
    pub(super) store: usize,
}

/// Copy that was found, or the fact that its instructions are in an unknown order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    Copy(InlinedPymalloc),
    UnknownOrder,
}

/// Move of a 64-bit word between a register and memory, which is at a register's value plus an offset.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Word {
    register: Register,
    base: Register,
    offset: u64,
}

impl Word {
    fn is_free_block_of(self, pool: Register) -> bool {
        self.base == pool && self.offset == FREE_BLOCK
    }
}

impl Body {
    /// Decodes the code of the function at these addresses.
    pub(super) fn decode(range: Range<u64>, code: &[u8]) -> Self {
        let decoder = Decoder::with_ip(64, code, range.start, DecoderOptions::NONE);
        Self {
            range,
            instructions: decoder.into_iter().collect(),
        }
    }

    /// Returns all copies of pymalloc in the function.
    pub(super) fn copies(&self) -> Vec<Found> {
        let changes = (0..self.instructions.len())
            .filter_map(|at| self.change_at(at).map(|(pool, by)| (at, pool, by)));
        changes
            .filter_map(|(at, pool, by)| self.copy_at(at, pool, by))
            .collect()
    }

    /// Returns the register with the address of the 32-bit number that an instruction changes by 1 or -1, and the
    /// change. Only numbers are considered that may be a pool's count.
    fn change_at(&self, at: usize) -> Option<(Register, i64)> {
        let instruction = &self.instructions[at];
        let is_memory = instruction.op0_kind() == OpKind::Memory;
        let base = plain_base(instruction, 0).filter(|_| is_memory)?;
        if instruction.memory_size().size() != 4 || !self.has_free_block_near(at, base) {
            return None;
        }
        let by = match instruction.mnemonic() {
            Mnemonic::Mov if instruction.op1_kind() == OpKind::Register => {
                self.change_of_stored(at, base)?
            }
            _ => constant_added(instruction)?,
        };
        (by.abs() == 1).then_some((base, by))
    }

    /// Whether `freeblock` of this pool is stored near an instruction. This is quick, and excludes the counts of
    /// references, thousands of which change in the same way from CPython 3.12 on.
    fn has_free_block_near(&self, at: usize, pool: Register) -> bool {
        let end = (at + 1 + REACH).min(self.instructions.len());
        let mut near = self.instructions[at.saturating_sub(REACH)..end].iter();
        near.any(|one| store(one).is_some_and(|store| store.is_free_block_of(pool)))
    }

    /// Returns the difference between the number that an instruction stores at a register's address, and the number
    /// that was loaded from there before.
    fn change_of_stored(&self, at: usize, base: Register) -> Option<i64> {
        let mut value = self.instructions[at].op1_register().full_register();
        let mut by = 0;
        for instruction in self.instructions[at.saturating_sub(REACH)..at].iter().rev() {
            let sets_value = instruction.op0_kind() == OpKind::Register
                && instruction.op0_register().full_register() == value;
            match instruction.mnemonic() {
                _ if !sets_value => {
                    if !goes_on(instruction)
                        || changes(instruction, base)
                        || changes(instruction, value)
                    {
                        return None;
                    }
                }
                Mnemonic::Mov if instruction.op1_kind() == OpKind::Register => {
                    value = instruction.op1_register().full_register();
                }
                Mnemonic::Mov => {
                    let is_count = plain_base(instruction, 0) == Some(base)
                        && instruction.memory_size().size() == 4;
                    return is_count.then_some(by);
                }
                Mnemonic::Lea if instruction.memory_index() == Register::None => {
                    by += i64::from(instruction.memory_displacement64() as i32);
                    value = instruction.memory_base().full_register();
                }
                _ => by += constant_added(instruction)?,
            }
        }
        None
    }

    /// Returns the copy of pymalloc that a change of a count belongs to; None if there is no copy.
    fn copy_at(&self, change: usize, pool: Register, by: i64) -> Option<Found> {
        let around = self.around(change, pool);
        let of_pool = |word: fn(&Instruction) -> Option<Word>| {
            let all = around
                .clone()
                .filter_map(move |at| Some((at, word(&self.instructions[at])?)));
            all.filter(move |(_, word)| word.is_free_block_of(pool))
        };
        let stores: Vec<(usize, Word)> = of_pool(store).collect();
        for (load, first) in of_pool(load) {
            for &(store, last) in stores.iter().filter(|(store, _)| *store > load) {
                let moves = match by {
                    1 if self.takes(load, first, store, last) => SlotOp::Alloc,
                    -1 if self.links(load + 1..around.end, store, first) => SlotOp::Free,
                    _ => continue,
                };
                // `freeblock` is the slot at the change: it is stored after, or was stored before.
                let (is_known, unchanged) = match moves {
                    SlotOp::Alloc => (change < store, load.min(change)..change),
                    SlotOp::Free => (store < change, store + 1..change),
                };
                let is_known =
                    is_known && !stores.iter().any(|(store, _)| unchanged.contains(store));
                return Some(match is_known {
                    true => Found::Copy(InlinedPymalloc {
                        moves,
                        pool,
                        change,
                        load,
                        store,
                    }),
                    false => Found::UnknownOrder,
                });
            }
        }
        None
    }

    /// Returns the instructions around one at which a register has the same value, as far as the code is straight.
    fn around(&self, at: usize, register: Register) -> Range<usize> {
        let mut start = at;
        while start > at.saturating_sub(REACH) && goes_on(&self.instructions[start - 1]) {
            start -= 1;
            if changes(&self.instructions[start], register) {
                break;
            }
        }
        let mut end = at + 1;
        let last = (at + 1 + REACH).min(self.instructions.len());
        while end < last && goes_on(&self.instructions[end]) {
            end += 1;
            if changes(&self.instructions[end - 1], register) {
                break;
            }
        }
        start..end
    }

    /// Whether the value that is stored is the first word of the slot that was loaded: the next free slot.
    fn takes(&self, load_at: usize, first: Word, store_at: usize, last: Word) -> bool {
        let mut between = self.instructions[load_at + 1..store_at]
            .iter()
            .filter_map(load);
        between.any(|next| {
            next.register == last.register && next.base == first.register && next.offset == 0
        })
    }

    /// Whether the loaded address of a free slot is stored elsewhere than in the pool's header: in the slot that is
    /// freed.
    fn links(&self, range: Range<usize>, store_at: usize, first: Word) -> bool {
        let mut elsewhere = range.filter(|at| *at != store_at);
        elsewhere.any(|at| {
            store(&self.instructions[at]).is_some_and(|link| link.register == first.register)
        })
    }

    /// Returns the first jump behind a copy's change of the count, if the kernel emulates the jump and the registers
    /// keep their values until there, and the register with the slot; None where `freeblock` still is the slot.
    pub(super) fn jump_behind(&self, copy: &InlinedPymalloc) -> Option<(usize, Option<Register>)> {
        let slot = load(&self.instructions[copy.load])?.register;
        let keeps = |range: Range<usize>, register| {
            let mut between = self.instructions[range].iter();
            !between.any(|instruction| changes(instruction, register))
        };
        let behind = copy.change + 1;
        let end = (behind + REACH).min(self.instructions.len());
        let jump =
            (behind..end).find(|&at| self.instructions[at].flow_control() != FlowControl::Next)?;
        let instruction = &self.instructions[jump];
        let is_near = instruction.ip() - self.instructions[copy.change].ip() < MAX_OFFSET;
        if !is_emulated_jump(instruction) || !is_near || !keeps(behind..jump, copy.pool) {
            return None;
        }
        match copy.moves {
            SlotOp::Alloc => keeps(copy.load + 1..jump, slot).then_some((jump, Some(slot))),
            SlotOp::Free => {
                let mut between = self.instructions[behind..jump].iter().filter_map(store);
                let is_stored = between.any(|store| store.is_free_block_of(copy.pool));
                (!is_stored).then_some((jump, None))
            }
        }
    }

    /// Returns the addresses of the functions that this one calls directly.
    pub(super) fn calls(&self) -> impl Iterator<Item = u64> {
        let calls = self.instructions.iter().filter(|call| {
            call.flow_control() == FlowControl::Call && call.op0_kind() == OpKind::NearBranch64
        });
        calls.map(Instruction::near_branch_target)
    }

    /// Whether the function computes the address of a pool of 16 KiB.
    pub(super) fn masks_pools(&self) -> bool {
        self.instructions.iter().any(|instruction| {
            instruction.op1_kind() == OpKind::Immediate32to64
                && instruction.immediate32to64() == POOL_MASK
        })
    }

    /// Whether the function sets the count of a pool to 1, and takes the pool's free slot without counting it.
    /// `counted` has the stores of the copies of pymalloc in the function.
    pub(super) fn makes_pools(&self, counted: &HashSet<usize>) -> bool {
        let ones = self.instructions.iter().filter(|one| {
            one.mnemonic() == Mnemonic::Mov
                && one.op0_kind() == OpKind::Memory
                && one.memory_size().size() == 4
                && one.op1_kind() == OpKind::Immediate32
                && one.immediate32() == 1
        });
        let pools: HashSet<Register> = ones.filter_map(|one| plain_base(one, 0)).collect();
        let mut stores = (0..self.instructions.len()).filter(|at| !counted.contains(at));
        !pools.is_empty()
            && stores.any(|store_at| {
                let last = store(&self.instructions[store_at]);
                let last = last
                    .filter(|last| last.is_free_block_of(last.base) && pools.contains(&last.base));
                let mut before = store_at.saturating_sub(REACH / 3)..store_at;
                last.is_some_and(|last| {
                    before.any(|load_at| {
                        let first = load(&self.instructions[load_at]);
                        let first = first.filter(|first| first.is_free_block_of(last.base));
                        first.is_some_and(|first| self.takes(load_at, first, store_at, last))
                    })
                })
            })
    }
}

/// Whether the next instruction may be executed after this one, with the registers that this one leaves.
fn goes_on(instruction: &Instruction) -> bool {
    matches!(
        instruction.flow_control(),
        FlowControl::Next | FlowControl::ConditionalBranch
    )
}

/// Returns the register of a memory operand that is just a register's value plus this offset.
fn plain_base(instruction: &Instruction, offset: u64) -> Option<Register> {
    let base = instruction.memory_base();
    let is_plain = base.is_gpr64()
        && base != Register::RSP
        && instruction.memory_index() == Register::None
        && instruction.memory_displacement64() == offset
        && instruction.segment_prefix() == Register::None;
    is_plain.then_some(base)
}

/// Returns the constant that an instruction adds to its first operand.
fn constant_added(instruction: &Instruction) -> Option<i64> {
    let constant = || match instruction.op1_kind() {
        OpKind::Immediate8to32 | OpKind::Immediate32 | OpKind::Immediate8to64 => {
            Some(i64::from(instruction.immediate(1) as i32))
        }
        _ => None,
    };
    match instruction.mnemonic() {
        Mnemonic::Inc => Some(1),
        Mnemonic::Dec => Some(-1),
        Mnemonic::Add => constant(),
        Mnemonic::Sub => constant().map(|constant| -constant),
        _ => None,
    }
}

/// Returns the 64-bit word that an instruction loads.
fn load(instruction: &Instruction) -> Option<Word> {
    word(
        instruction,
        OpKind::Register,
        OpKind::Memory,
        instruction.op0_register(),
    )
}

/// Returns the 64-bit word that an instruction stores.
fn store(instruction: &Instruction) -> Option<Word> {
    word(
        instruction,
        OpKind::Memory,
        OpKind::Register,
        instruction.op1_register(),
    )
}

fn word(instruction: &Instruction, to: OpKind, from: OpKind, register: Register) -> Option<Word> {
    let is_word = instruction.mnemonic() == Mnemonic::Mov
        && instruction.op0_kind() == to
        && instruction.op1_kind() == from
        && register.is_gpr64();
    let offset = instruction.memory_displacement64();
    let base = plain_base(instruction, offset).filter(|_| is_word)?;
    Some(Word {
        register,
        base,
        offset,
    })
}

/// Whether an instruction changes a register.
fn changes(instruction: &Instruction, register: Register) -> bool {
    let mut information = InstructionInfoFactory::new();
    let used = information.info(instruction).used_registers();
    used.iter()
        .any(|used| writes(used.access()) && used.register().full_register() == register)
}
