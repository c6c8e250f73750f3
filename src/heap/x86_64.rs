//! Registers of a stopped thread, and the layout of a process's memory, on x86-64.

use std::ops::Range;

/// Bits of an address in the half of the address space that user programs have. Further bits of a pointer may be a tag.
pub(super) const ADDRESS_BITS: u32 = 47;

/// Names of the general registers, in the order of the kernel's `user_regs_struct`.
pub const GENERAL_REGISTERS: [&str; 27] = [
    "r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi",
    "rdi", "orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs",
    "gs",
];

/// Index in the general registers of the address of the next instruction.
pub(super) const INSTRUCTION: usize = 16;
/// Index in the general registers of the stack pointer.
pub(super) const STACK_POINTER: usize = 19;
/// Index in the general registers of the thread pointer.
pub(super) const THREAD_POINTER: usize = 21;
/// Index in the general registers of the number of the system call that the thread is in, or a negative number.
pub(super) const SYSTEM_CALL: usize = 15;
/// Index in the general registers of the first argument of a system call.
pub(super) const ARGUMENT: usize = 14;

/// Register set of everything that `user_regs_struct` lacks (NT_X86_XSTATE): x87, SSE, AVX and so on.
pub(super) const VECTOR_SET: i32 = 0x202;

/// Bytes below the stack pointer that a function may use (the System V ABI's red zone).
pub(super) const RED_ZONE: u64 = 128;

/// Returns the `bytes` of memory next to the thread pointer that hold the variables of the thread's own. They end at the
/// thread pointer (variant II of the ABI for thread-local storage).
pub(super) fn thread_locals(thread_pointer: u64, bytes: u64) -> Range<u64> {
    thread_pointer.saturating_sub(bytes)..thread_pointer
}
