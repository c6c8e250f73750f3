/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * The user stack of the current task, from inside the kernel: a system call, a
 * page fault, an interrupt.
 */
#ifndef MEMTOOLS_TASK_STACK_BPF_H
#define MEMTOOLS_TASK_STACK_BPF_H

#include "registers.bpf.h"
#include "stack.bpf.h"

/* What the task was doing in user mode when it last entered the kernel. */
struct user_registers {
	__u64 pc;
	__u64 sp;
	__u64 fp;
	__u64 cs;
};

#define PF_KTHREAD	    0x00200000
#define CODE_SEGMENT_RING   3
#define CODE_SEGMENT_32_BIT 0x23

static __noinline int read_user_registers(struct user_registers *registers)
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
 * The id of the stack. STACK_NONE for kernel threads, and for 32-bit programs, whose
 * frames are laid out otherwise.
 */
static __noinline __u64 stack_of_task(void)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct user_registers registers = {};

	if (BPF_CORE_READ(task, flags) & PF_KTHREAD)
		return STACK_NONE;
	read_user_registers(&registers);
	/* A kernel worker of a process (io_uring) has never been in user mode. */
	if (!registers.pc || (registers.cs & 3) != CODE_SEGMENT_RING ||
	    registers.cs == CODE_SEGMENT_32_BIT)
		return STACK_NONE;
	return stack_id(registers.pc, registers.sp, registers.fp, 1);
}

#endif /* MEMTOOLS_TASK_STACK_BPF_H */
