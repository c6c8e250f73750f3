//! Registers of a stopped thread, and the layout of a process's memory, on arm64.

use std::ops::Range;

use crate::heap::image::{Image, Thread};
use crate::heap::page_index::PAGE;

/// Largest size of glibc's `struct pthread`, which ends at the thread pointer.
const PTHREAD_BYTES: u64 = 0x900;
/// Offset in glibc's `struct pthread` of the list that all stacks are in, by their neighbours.
const PTHREAD_LIST: u64 = 0xc0;
/// Offset in glibc's `struct pthread` of the thread's ID, which is 0 after its end.
const PTHREAD_ID: u64 = 0xd0;
/// Largest distance from the end of a thread's stack down to its `struct pthread`.
const PTHREAD_WITHIN: u64 = 16 << 10;
/// Alignment of a `struct pthread`.
const PTHREAD_ALIGNMENT: usize = 64;
/// Bytes at the thread pointer that stay in use after the thread's end: the pointer to the table of thread-local
/// storage, which the next thread uses again.
const KEPT_AT_THREAD_POINTER: u64 = 16;
/// Largest number of modules with thread-local storage that are considered for a thread.
const MODULES: u64 = 4096;

/// Bits of an address in the half of the address space that user programs have. Further bits of a pointer may be a tag.
/// Addresses above 48 bits are for programs that request them of mmap(2).
pub(super) const ADDRESS_BITS: u32 = 48;

/// Words of the kernel's `user_regs_struct`.
pub(super) const STRUCT_WORDS: usize = 34;

/// Names of the general registers, in the order of the kernel's `user_regs_struct`, and two of register sets of their
/// own.
pub const GENERAL_REGISTERS: [&str; STRUCT_WORDS + 2] = [
    "x0",
    "x1",
    "x2",
    "x3",
    "x4",
    "x5",
    "x6",
    "x7",
    "x8",
    "x9",
    "x10",
    "x11",
    "x12",
    "x13",
    "x14",
    "x15",
    "x16",
    "x17",
    "x18",
    "x19",
    "x20",
    "x21",
    "x22",
    "x23",
    "x24",
    "x25",
    "x26",
    "x27",
    "x28",
    "x29",
    "x30",
    "sp",
    "pc",
    "pstate",
    "syscallno",
    "tpidr",
];

/// Index in the general registers of the address of the next instruction.
pub(super) const INSTRUCTION: usize = 32;
/// Index in the general registers of the stack pointer.
pub(super) const STACK_POINTER: usize = 31;
/// Index in the general registers of the thread pointer.
pub(super) const THREAD_POINTER: usize = 35;
/// Index in the general registers of the number of the system call that the thread is in, or a negative number.
pub(super) const SYSTEM_CALL: usize = 34;
/// Index in the general registers of the first argument of a system call.
pub(super) const ARGUMENT: usize = 0;

/// Register set of the vector registers (NT_PRFPREG). Those of SVE are longer than these, and begin with them.
pub(super) const VECTOR_SET: i32 = libc::NT_PRFPREG;

/// Register set of the thread pointer (NT_ARM_TLS).
const TLS_SET: i32 = 0x401;
/// Register set of the number of the system call, which has four bytes (NT_ARM_SYSTEM_CALL).
const SYSTEM_CALL_SET: i32 = 0x404;

/// Bytes below the stack pointer that a function may use: none.
pub(super) const RED_ZONE: u64 = 0;

/// Returns the general registers of a stopped thread. `read` reads one of its register sets.
pub(super) fn general_registers(read: impl Fn(i32) -> Option<Vec<u64>>) -> Option<Vec<u64>> {
    let mut general = read(libc::NT_PRSTATUS)?;
    if general.len() != STRUCT_WORDS {
        return None;
    }
    let number = *read(SYSTEM_CALL_SET)?.first()?;
    general.push(i64::from(number as i32).cast_unsigned());
    general.push(*read(TLS_SET)?.first()?);
    Some(general)
}

/// Returns the `bytes` of memory next to the thread pointer that hold the variables of the thread's own. They begin at
/// the thread pointer (variant I of the ABI for thread-local storage).
pub(super) fn thread_locals(thread_pointer: u64, bytes: u64) -> Range<u64> {
    thread_pointer..thread_pointer.saturating_add(bytes)
}

/// Returns a thread's own storage: from its control block, which ends at the thread pointer, to the page in which the
/// highest block of its modules' static storage begins. The word at the thread pointer points at glibc's table of these
/// blocks (dtv): pairs of a block and what is to be freed of it, with their number two words before. Further pages of
/// the highest block are not known.
pub(super) fn own_storage(image: &Image, thread: &Thread) -> Option<Range<u64>> {
    let pointer = thread.thread_pointer;
    let area = image
        .area(pointer)
        .filter(|area| area.is_private_anonymous())?;
    let end = end_of_storage(image, pointer, &area.mapping.range);
    Some(pointer.saturating_sub(PTHREAD_BYTES)..end)
}

/// Returns the end of the page in which the highest block of static thread-local storage begins.
fn end_of_storage(image: &Image, pointer: u64, memory: &Range<u64>) -> u64 {
    let table = image.word(pointer).unwrap_or_default();
    let word = |at: u64| image.word(table.saturating_add(at)).unwrap_or_default();
    let modules = image.word(table.saturating_sub(16)).unwrap_or_default();
    let blocks =
        (1..=modules.min(MODULES)).map(|module| (word(16 * module), word(16 * module + 8)));
    let above = pointer..memory.end;
    let fixed = blocks.filter(|&(block, freed)| freed == 0 && above.contains(&block));
    let highest = fixed.map(|(block, _)| block).max().unwrap_or(pointer);
    (highest + 1).next_multiple_of(PAGE).min(memory.end)
}

/// Returns the parts of a stack, kept by glibc for later threads, that belonged to a thread that has ended and are not
/// read again; none if no thread has had the stack. Its `struct pthread` has no ID any more, and is still in a list whose
/// neighbours refer to it. How large it is, a living thread shows.
pub(super) fn unused_of_ended(image: &Image, stack: &Range<u64>) -> Vec<Range<u64>> {
    let from = stack.end.saturating_sub(PTHREAD_WITHIN).max(stack.start);
    let first = from.next_multiple_of(PTHREAD_ALIGNMENT as u64);
    let found = (first..stack.end)
        .step_by(PTHREAD_ALIGNMENT)
        .find(|&control| thread_id(image, control) == Some(0) && is_in_list(image, control));
    let Some(control) = found else {
        return Vec::new();
    };
    let mut unused = vec![stack.start..control];
    if let Some(bytes) = image
        .threads
        .iter()
        .find_map(|one| pthread_bytes(image, one))
    {
        let pointer = control + bytes;
        unused.push(control..pointer);
        let storage = end_of_storage(image, pointer, stack);
        unused.push((pointer + KEPT_AT_THREAD_POINTER).min(storage)..storage);
    }
    unused
}

/// Returns the ID in glibc's `struct pthread` at this address.
fn thread_id(image: &Image, control: u64) -> Option<u32> {
    image.word(control + PTHREAD_ID).map(|word| word as u32)
}

/// Whether the neighbours in the list of stacks refer to the entry in this `struct pthread`.
fn is_in_list(image: &Image, control: u64) -> bool {
    let entry = control + PTHREAD_LIST;
    let neighbour = |at: u64| image.word(at).filter(|&word| word != 0 && word != entry);
    let (next, previous) = (neighbour(entry), neighbour(entry + 8));
    next.and_then(|next| image.word(next.checked_add(8)?)) == Some(entry)
        && previous.and_then(|previous| image.word(previous)) == Some(entry)
}

/// Returns the size of glibc's `struct pthread`, by a living thread's, which has its ID and is in the list.
fn pthread_bytes(image: &Image, thread: &Thread) -> Option<u64> {
    (PTHREAD_ID..PTHREAD_BYTES).step_by(16).find(|&bytes| {
        let control = thread.thread_pointer.wrapping_sub(bytes);
        thread_id(image, control) == Some(thread.tid) && is_in_list(image, control)
    })
}
