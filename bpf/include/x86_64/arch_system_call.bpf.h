/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * System calls of x86-64, and of the 32-bit programs (i386) that it runs: functions, numbers and
 * arguments.
 */
#ifndef MEMTOOLS_ARCH_SYSTEM_CALL_BPF_H
#define MEMTOOLS_ARCH_SYSTEM_CALL_BPF_H

#include "arch_registers.bpf.h"

/* Prefix of the kernel's functions of system calls. */
#define SYSTEM_CALL "__x64_sys_"

#define SYSTEM_CALL_MMAP 9

#define TS_COMPAT     0x2 /* the thread is in a system call of the 32-bit table */
#define PAGE_SHIFT_32 12  /* of mmap2's offset, for pages of any size */

/* Numbers of the 32-bit table. */
enum compat_number {
	COMPAT_MMAP = 90, /* its arguments are in memory */
	COMPAT_MUNMAP = 91,
	COMPAT_MREMAP = 163,
	COMPAT_MMAP2 = 192, /* the offset is in pages */
};

/*
 * Returns the number of the system call that the task has entered the kernel with. `regs` are the
 * registers that tracepoints of all system calls have.
 */
static __always_inline __u64 system_call_number(struct pt_regs *regs)
{
	return BPF_CORE_READ(regs, orig_ax);
}

/* Reads the arguments of the system call that the task is in. */
static inline __noinline int read_system_call_arguments(__u64 args[6])
{
	struct pt_regs *regs;

	if (has_register_helpers()) {
		regs = registers_by_helpers();
		args[0] = regs->di;
		args[1] = regs->si;
		args[2] = regs->dx;
		args[3] = regs->r10;
		args[4] = regs->r8;
		args[5] = regs->r9;
	} else {
		regs = registers_on_stack();
		args[0] = BPF_CORE_READ(regs, di);
		args[1] = BPF_CORE_READ(regs, si);
		args[2] = BPF_CORE_READ(regs, dx);
		args[3] = BPF_CORE_READ(regs, r10);
		args[4] = BPF_CORE_READ(regs, r8);
		args[5] = BPF_CORE_READ(regs, r9);
	}
	return 0;
}

/* Whether the current task is in a system call of the 32-bit table, which has other numbers. */
static __always_inline bool in_compat_call(void)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task();

	return BPF_CORE_READ(task, thread_info.status) & TS_COMPAT;
}

/*
 * Reads the arguments of a call of mmap(2), munmap(2) or mremap(2) with this number of the 32-bit
 * table. The offset is in bytes.
 */
static __always_inline void read_compat_arguments(__u64 args[6], struct pt_regs *regs, __u64 number)
{
	__u32 in_memory[6] = {};

	if (number == COMPAT_MMAP) {
		bpf_probe_read_user(in_memory, sizeof(in_memory),
				    (void *)(__u64)(__u32)BPF_CORE_READ(regs, bx));
		for (int i = 0; i < 6; i++)
			args[i] = in_memory[i];
		return;
	}
	args[0] = (__u32)BPF_CORE_READ(regs, bx);
	args[1] = (__u32)BPF_CORE_READ(regs, cx);
	args[2] = (__u32)BPF_CORE_READ(regs, dx);
	args[3] = (__u32)BPF_CORE_READ(regs, si);
	args[4] = (__u32)BPF_CORE_READ(regs, di);
	args[5] = (__u64)(__u32)BPF_CORE_READ(regs, bp) << PAGE_SHIFT_32;
}

#endif /* MEMTOOLS_ARCH_SYSTEM_CALL_BPF_H */
