//! The machine's name and its number in ELF files, and its registers by the numbers that unwind information has for
//! them.

use gimli::{AArch64, Register, Vendor};
use object::elf;

/// The machine's name, for messages.
pub(crate) const NAME: &str = "arm64";

/// Path of Debian's C library for this machine.
#[cfg(test)]
pub(crate) const C_LIBRARY: &str = "/usr/lib/aarch64-linux-gnu/libc.so.6";

/// The number of arm64 in the header of an ELF file.
pub(crate) const MACHINE: u16 = elf::EM_AARCH64.0;

/// The vendor whose extensions unwind information has: it says where the return address is signed.
pub(crate) const VENDOR: Vendor = Vendor::AArch64;

/// The stack pointer.
pub(crate) const STACK_POINTER: Register = AArch64::SP;

/// The frame pointer, x29.
pub(crate) const FRAME_POINTER: Register = AArch64::X29;

/// Registers that take the place of the stack pointer in the CFA's rule while a function changes the stack pointer:
/// by the numbers of the BPF side (`user_register_at()` in `bpf/include/aarch64/arch_registers.bpf.h`).
pub(crate) const STAND_INS: [Register; 7] = [
    AArch64::X9,
    AArch64::X10,
    AArch64::X11,
    AArch64::X12,
    AArch64::X13,
    AArch64::X14,
    AArch64::X15,
];

/// The return address, which unwind information treats as a register: the link register, x30.
pub(crate) const RETURN_ADDRESS: Register = AArch64::X30;

/// Decodes the expression for the CFA of a PLT. Linkers make none for arm64.
pub(crate) fn plt_push(_expression: &[u8]) -> Option<u8> {
    None
}
