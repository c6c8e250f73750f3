/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Registers with which the current task last entered the kernel from user mode, on arm64. The
 * helpers that return their address are in all kernels that have the atomic operations of
 * arch_order.bpf.h.
 *
 * A function that is both inline and __noinline is called where it is used, and causes no warning
 * where it is not.
 */
#ifndef MEMTOOLS_ARCH_REGISTERS_BPF_H
#define MEMTOOLS_ARCH_REGISTERS_BPF_H

#include "current_task.bpf.h"

#define FRAME_POINTER 29
#define LINK	      30

/* Bits of the processor state: the exception level, which is 0 in user mode, and 32-bit code. */
#define STATE_MODE 0x1f

/*
 * Bits of an address of code: the others can be a signature (pointer authentication). Addresses
 * above 48 bits are for programs that request them of mmap(2).
 */
#define CODE_ADDRESS_MASK ((1ULL << 48) - 1)

/* State of a task in user mode when it last entered the kernel. */
struct user_registers {
	__u64 pc;
	__u64 sp;
	__u64 fp;
	__u64 link;  /* return address in the link register */
	__u64 state; /* the processor's, for user_registers_are_64_bit() */
};

/* Returns an address of code without its signature. */
static __always_inline __u64 code_address(__u64 address)
{
	return address & CODE_ADDRESS_MASK;
}

/* Returns the registers, which may be read by plain loads. */
static __always_inline struct pt_regs *registers_by_helpers(void)
{
	return (struct pt_regs *)bpf_task_pt_regs(bpf_get_current_task_btf());
}

static inline __noinline int read_user_registers(struct user_registers *registers)
{
	struct pt_regs *regs = registers_by_helpers();

	registers->pc = regs->pc;
	registers->sp = regs->sp;
	registers->fp = regs->regs[FRAME_POINTER];
	registers->link = code_address(regs->regs[LINK]);
	registers->state = regs->pstate;
	return 0;
}

/*
 * Returns a register of the task's user mode by its DWARF number, which is that of the register:
 * one of those that compilers use in place of the stack pointer while they change that. 0 for
 * others, or if the task was not at this instruction with this stack pointer when it entered the
 * kernel.
 */
static inline __noinline __u64 user_register_at(__u64 pc, __u64 sp, __u64 number)
{
	struct pt_regs *regs = registers_by_helpers();
	__u64 value = 0;

	if (regs->pc != pc || regs->sp != sp || number >= LINK)
		return 0;
	bpf_probe_read_kernel(&value, sizeof(value), &regs->regs[number]);
	return value;
}

/*
 * Whether the registers are those of a 64-bit program. A kernel worker of a process (io_uring) has
 * never been in user mode.
 */
static __always_inline bool user_registers_are_64_bit(const struct user_registers *registers)
{
	return registers->pc && !(registers->state & STATE_MODE);
}

#endif /* MEMTOOLS_ARCH_REGISTERS_BPF_H */
