/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Registers with which the current task last entered the kernel from user mode, on x86-64. They are
 * at the top of the task's kernel stack.
 *
 * Helpers return their address since 5.15 (5.11 for the task). On 5.10 the address is computed:
 * later kernels can have padding above the registers (CONFIG_X86_FRED), 5.10 has none on x86-64.
 * The test is a constant after relocation, so the verifier never sees a branch whose helpers are
 * missing.
 *
 * Another architecture has a file of this name in a directory of its own, with the same functions
 * and structs. A function that is both inline and __noinline is called where it is used, and causes
 * no warning where it is not.
 */
#ifndef MEMTOOLS_ARCH_REGISTERS_BPF_H
#define MEMTOOLS_ARCH_REGISTERS_BPF_H

#include "current_task.bpf.h"

#define THREAD_BYTES	    (16 << 10)
#define CODE_SEGMENT_RING   3
#define CODE_SEGMENT_32_BIT 0x23

/* Registers by the numbers that unwind information has for them. */
#define DWARF_RBX 3
#define DWARF_R10 10
#define DWARF_R11 11

/* State of a task in user mode when it last entered the kernel. */
struct user_registers {
	__u64 pc;
	__u64 sp;
	__u64 fp;
	__u64 link; /* return address in a register: 0 */
	__u64 cs;   /* the code segment, for user_registers_are_64_bit() */
};

static __always_inline bool has_register_helpers(void)
{
	return bpf_core_enum_value_exists(enum bpf_func_id, BPF_FUNC_task_pt_regs) &&
	       has_current_task_btf();
}

/* Returns the registers, which may be read by plain loads, if has_register_helpers(). */
static __always_inline struct pt_regs *registers_by_helpers(void)
{
	return (struct pt_regs *)bpf_task_pt_regs(bpf_get_current_task_btf());
}

/* Returns the registers on kernels without the helpers. */
static __always_inline struct pt_regs *registers_on_stack(void)
{
	struct task_struct *task = (void *)bpf_get_current_task();

	return BPF_CORE_READ(task, stack) + THREAD_BYTES - bpf_core_type_size(struct pt_regs);
}

static inline __noinline int read_user_registers(struct user_registers *registers)
{
	struct pt_regs *regs;

	if (has_register_helpers()) {
		regs = registers_by_helpers();
		registers->pc = regs->ip;
		registers->sp = regs->sp;
		registers->fp = regs->bp;
		registers->cs = regs->cs;
	} else {
		regs = registers_on_stack();
		registers->pc = BPF_CORE_READ(regs, ip);
		registers->sp = BPF_CORE_READ(regs, sp);
		registers->fp = BPF_CORE_READ(regs, bp);
		registers->cs = BPF_CORE_READ(regs, cs);
	}
	return 0;
}

/*
 * Returns a register of the task's user mode by its DWARF number: one of those that compilers use
 * in place of the stack pointer while they change that. 0 for others, or if the task was not at
 * this instruction with this stack pointer when it entered the kernel.
 */
static inline __noinline __u64 user_register_at(__u64 pc, __u64 sp, __u64 number)
{
	struct pt_regs *regs =
	    has_register_helpers() ? registers_by_helpers() : registers_on_stack();

	if (BPF_CORE_READ(regs, ip) != pc || BPF_CORE_READ(regs, sp) != sp)
		return 0;
	if (number == DWARF_RBX)
		return BPF_CORE_READ(regs, bx);
	if (number == DWARF_R10)
		return BPF_CORE_READ(regs, r10);
	return number == DWARF_R11 ? BPF_CORE_READ(regs, r11) : 0;
}

/*
 * Whether the registers are those of a 64-bit program. A kernel worker of a process (io_uring) has
 * never been in user mode.
 */
static __always_inline bool user_registers_are_64_bit(const struct user_registers *registers)
{
	return registers->pc && (registers->cs & 3) == CODE_SEGMENT_RING &&
	       registers->cs != CODE_SEGMENT_32_BIT;
}

#endif /* MEMTOOLS_ARCH_REGISTERS_BPF_H */
