//! Registers of a stopped thread, and the layout of a process's memory, on x86-64.

use std::ops::Range;

use crate::heap::image::{Image, Thread};
use crate::heap::page_index::PAGE;

/// Largest distance from the end of a thread's stack down to its control block, in glibc.
const CONTROL_BLOCK_WITHIN: u64 = 16 << 10;
/// Bytes of the control block that stay in use after its thread has ended. The pointer to the table of thread-local
/// storage is among them, and the next thread uses that table again.
const KEPT_OF_CONTROL_BLOCK: u64 = 64;
/// Size of glibc's `struct pthread`, which begins with the control block, rounded up.
const PTHREAD_BYTES: u64 = 0x900;
/// Largest number of modules with thread-local storage that are considered for a thread.
const MODULES: u64 = 4096;

/// Bits of an address in the half of the address space that user programs have. Further bits of a pointer may be a tag.
pub(super) const ADDRESS_BITS: u32 = 47;

/// Words of the kernel's `user_regs_struct`.
pub(super) const STRUCT_WORDS: usize = 27;

/// Names of the general registers, in the order of the kernel's `user_regs_struct`.
pub const GENERAL_REGISTERS: [&str; STRUCT_WORDS] = [
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

/// Returns the general registers of a stopped thread. `read` reads one of its register sets.
pub(super) fn general_registers(read: impl Fn(i32) -> Option<Vec<u64>>) -> Option<Vec<u64>> {
    read(libc::NT_PRSTATUS)
}

/// Returns the `bytes` of memory next to the thread pointer that hold the variables of the thread's own. They end at the
/// thread pointer (variant II of the ABI for thread-local storage).
pub(super) fn thread_locals(thread_pointer: u64, bytes: u64) -> Range<u64> {
    thread_pointer.saturating_sub(bytes)..thread_pointer
}

/// Returns a thread's own storage: from the lowest block of its modules' static storage, which are below its control
/// block, to the end of the control block. The control block's second word points at the table of these blocks (dtv).
/// glibc's table has pairs of a block and what is to be freed of it, with their number two words before. musl's
/// table, which is at the beginning of the storage, has their number and then the blocks. Modules that are loaded
/// later into the space that glibc's loader has spare below are not in the table.
pub(super) fn own_storage(image: &Image, thread: &Thread) -> Option<Range<u64>> {
    let control = thread.thread_pointer;
    let area = image
        .area(control)
        .filter(|area| area.is_private_anonymous())?;
    let below = area.mapping.range.start..control;
    let end = control.saturating_add(PTHREAD_BYTES);
    let Some(table) = image.word(control.saturating_add(8)) else {
        return Some(control..end);
    };
    let word = |at: u64| image.word(table.saturating_add(at)).unwrap_or_default();
    if below.contains(&table) && word(0) < MODULES && (table..control).contains(&word(8)) {
        return Some(table..end);
    }
    let modules = image.word(table.saturating_sub(16)).unwrap_or_default();
    let blocks =
        (1..=modules.min(MODULES)).map(|module| (word(16 * module), word(16 * module + 8)));
    let fixed = blocks.filter(|&(block, freed)| freed == 0 && below.contains(&block));
    let start = fixed.map(|(block, _)| block).min().unwrap_or(control);
    Some(start..end)
}

/// Returns the parts of a stack, kept by glibc for later threads, that belonged to a thread that has ended and are not
/// read again; none if no thread has had the stack. The control block begins with its own address, and has this address
/// again 16 bytes on.
pub(super) fn unused_of_ended(image: &Image, stack: &Range<u64>) -> Vec<Range<u64>> {
    let last = stack
        .end
        .saturating_sub(CONTROL_BLOCK_WITHIN)
        .max(stack.start)..stack.end;
    let control = image
        .words(last)
        .find(|&(address, word)| address == word && image.word(address + 16) == Some(address));
    let Some((control, _)) = control else {
        return Vec::new();
    };
    let end = (control + PTHREAD_BYTES).next_multiple_of(PAGE);
    vec![
        stack.start..control,
        control + KEPT_OF_CONTROL_BLOCK..end.min(stack.end),
    ]
}
