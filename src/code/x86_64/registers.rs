//! The machine's name and its number in ELF files, its registers by the numbers that unwind information has for them,
//! and the rule that linkers make for its PLT.

use gimli::{Register, Vendor, X86_64};
use object::elf;

/// The machine's name, for messages.
pub(crate) const NAME: &str = "x86-64";

/// Path of Debian's C library for this machine.
#[cfg(test)]
pub(crate) const C_LIBRARY: &str = "/usr/lib/x86_64-linux-gnu/libc.so.6";

/// The number of x86-64 in the header of an ELF file.
pub(crate) const MACHINE: u16 = elf::EM_X86_64.0;

/// The vendor whose extensions unwind information has: none.
pub(crate) const VENDOR: Vendor = Vendor::Default;

/// The stack pointer, rsp.
pub(crate) const STACK_POINTER: Register = X86_64::RSP;

/// The frame pointer, rbp.
pub(crate) const FRAME_POINTER: Register = X86_64::RBP;

/// Registers that take the place of the stack pointer in the CFA's rule while a function changes the stack pointer:
/// by the numbers of the BPF side (`user_register_at()` in `bpf/include/x86_64/arch_registers.bpf.h`).
pub(crate) const STAND_INS: [Register; 3] = [X86_64::RBX, X86_64::R10, X86_64::R11];

/// The return address, which unwind information treats as a register.
pub(crate) const RETURN_ADDRESS: Register = X86_64::RA;

/// Decodes the expression for the CFA of a PLT: rsp + 8 + ((rip & 15) >= byte) * 8. Returns `byte`: the offset, in an
/// entry, behind the push.
pub(crate) fn plt_push(expression: &[u8]) -> Option<u8> {
    match *expression {
        [
            0x77,
            8,
            0x80,
            0,
            0x3f,
            0x1a,
            literal @ 0x30..=0x3f,
            0x2a,
            0x33,
            0x24,
            0x22,
        ] => Some(literal - 0x30),
        _ => None,
    }
}
