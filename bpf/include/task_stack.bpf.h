/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * User stack of the current task, taken inside the kernel: in a system call, a page fault, an
 * interrupt.
 */
#ifndef MEMTOOLS_TASK_STACK_BPF_H
#define MEMTOOLS_TASK_STACK_BPF_H

#include "arch_registers.bpf.h"
#include "current_task.bpf.h"
#include "stack.bpf.h"

/*
 * Returns the id of the current task's user stack. STACK_NONE for kernel threads, and for 32-bit
 * programs, whose frames have another layout.
 */
static __noinline __u64 stack_of_task(void)
{
	struct user_registers registers = {};

	if (flags_of_current() & PF_KTHREAD)
		return STACK_NONE;
	read_user_registers(&registers);
	if (!user_registers_are_64_bit(&registers))
		return STACK_NONE;
	return stack_id(registers.pc, registers.sp, registers.fp, 1, registers.link);
}

#endif /* MEMTOOLS_TASK_STACK_BPF_H */
