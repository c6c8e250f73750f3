//! The machine's number in ELF files, and its registers by the numbers that unwind information has for them.

use gimli::{Register, X86_64};
use object::elf;

/// The number of x86-64 in the header of an ELF file.
pub(crate) const MACHINE: u16 = elf::EM_X86_64.0;

/// The stack pointer, rsp.
pub(crate) const STACK_POINTER: Register = X86_64::RSP;

/// The frame pointer, rbp.
pub(crate) const FRAME_POINTER: Register = X86_64::RBP;

/// Registers that take the place of the stack pointer in the CFA's rule while a function changes the stack pointer:
/// by the numbers of the BPF side (`user_register_at()` in `bpf/include/x86_64/arch_registers.bpf.h`).
pub(crate) const STAND_INS: [Register; 3] = [X86_64::RBX, X86_64::R10, X86_64::R11];

/// The return address, which unwind information treats as a register.
pub(crate) const RETURN_ADDRESS: Register = X86_64::RA;

/// Place of the return address, in bytes from the canonical frame address. A call has pushed it.
pub(crate) const RETURN_ADDRESS_AT: i64 = -8;
