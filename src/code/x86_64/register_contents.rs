//! Contents of the registers of x86-64 while a function's first instructions are executed: the arguments that the
//! function was called with, or other values.

use iced_x86::{Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind, Register};

/// Number of a function's arguments that are in registers.
pub(crate) const ARGUMENTS: usize = 6;

/// Registers that hold the arguments at a function's entry, by the numbers of their arguments: each argument is in
/// its own.
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

/// Contents of the registers, by the registers' numbers in the instruction set: the number of the argument that a
/// register holds as it was at entry, or None for any other value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct RegisterContents([Option<u8>; 16]);

impl RegisterContents {
    pub(crate) fn at_entry() -> Self {
        let mut held = Self([None; 16]);
        for (register, argument) in ARGUMENT_REGISTERS.iter().zip(1..) {
            held.0[register.number()] = Some(argument);
        }
        held
    }

    /// Returns the number of the argument that the register of `argument` holds; None if it holds another value.
    pub(crate) fn in_register_of(&self, argument: u8) -> Option<u8> {
        let index = usize::from(argument.checked_sub(1)?);
        self.0[ARGUMENT_REGISTERS.get(index)?.number()]
    }

    /// Returns the argument registers that hold these arguments; None if one of the arguments is in no argument
    /// register.
    pub(crate) fn held_by(&self, arguments: &[u8]) -> Option<[u8; ARGUMENTS]> {
        let mut held_by = IN_THEIR_OWN;
        for &argument in arguments {
            // The argument's own register comes first, if it still holds the argument.
            let holder = [argument, 1, 2, 3, 4, 5, 6]
                .into_iter()
                .find(|&holder| self.in_register_of(holder) == Some(argument))?;
            *held_by.get_mut(usize::from(argument) - 1)? = holder;
        }
        Some(held_by)
    }

    /// Returns the contents after one instruction.
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

    /// Returns the contents after a call, which preserves only some registers.
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
