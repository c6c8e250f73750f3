//! What the registers of x86-64 hold while a function's first instructions are executed: the
//! arguments that it was called with, or something else.

use iced_x86::{Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind, Register};

/// How many arguments of a function are in registers.
pub(crate) const ARGUMENTS: usize = 6;

/// The numbers of the arguments whose registers hold the arguments, at a function's entry.
pub(crate) const IN_THEIR_OWN: [u8; ARGUMENTS] = [1, 2, 3, 4, 5, 6];

/// The registers of the arguments from the first on.
const ARGUMENT_REGISTERS: [Register; ARGUMENTS] = [
    Register::RDI,
    Register::RSI,
    Register::RDX,
    Register::RCX,
    Register::R8,
    Register::R9,
];

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
    pub(crate) fn held_by(&self, arguments: &[u8]) -> Option<[u8; ARGUMENTS]> {
        let mut held_by = IN_THEIR_OWN;
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

/// Whether an instruction that uses a register or memory in this way may change it.
pub(crate) fn writes(access: OpAccess) -> bool {
    !matches!(
        access,
        OpAccess::None | OpAccess::Read | OpAccess::CondRead | OpAccess::NoMemAccess
    )
}
