/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * System calls of arm64, and of the 32-bit programs (ARM EABI) that it runs: functions, numbers and
 * arguments.
 */
#ifndef MEMTOOLS_ARCH_SYSTEM_CALL_BPF_H
#define MEMTOOLS_ARCH_SYSTEM_CALL_BPF_H

#include "arch_registers.bpf.h"

/* Prefix of the kernel's functions of system calls. */
#define SYSTEM_CALL "__arm64_sys_"

#define SYSTEM_CALL_MMAP 222

#define THREAD_32_BIT 22 /* bit of the thread's flags: its program has 32 bits */
#define PAGE_SHIFT_32 12 /* of mmap2's offset, for pages of any size */

/* Numbers of the 32-bit table. */
enum compat_number {
	COMPAT_MMAP = 90, /* of the old ABI, which the kernel does not run */
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
	return BPF_CORE_READ(regs, syscallno);
}

/* Reads the arguments of the system call that the task is in. */
static inline __noinline int read_system_call_arguments(__u64 args[6])
{
	struct pt_regs *regs = registers_by_helpers();

	/* The result is in x0. */
	args[0] = regs->orig_x0;
	args[1] = regs->regs[1];
	args[2] = regs->regs[2];
	args[3] = regs->regs[3];
	args[4] = regs->regs[4];
	args[5] = regs->regs[5];
	return 0;
}

/* Whether the current task is in a system call of the 32-bit table, which has other numbers. */
static __always_inline bool in_compat_call(void)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task();

	return BPF_CORE_READ(task, thread_info.flags) >> THREAD_32_BIT & 1;
}

/*
 * Reads the arguments of a call of mmap(2), munmap(2) or mremap(2) with this number of the 32-bit
 * table. The offset is in bytes.
 */
static __always_inline void read_compat_arguments(__u64 args[6], struct pt_regs *regs, __u64 number)
{
	args[0] = (__u32)BPF_CORE_READ(regs, orig_x0);
	args[1] = (__u32)BPF_CORE_READ(regs, regs[1]);
	args[2] = (__u32)BPF_CORE_READ(regs, regs[2]);
	args[3] = (__u32)BPF_CORE_READ(regs, regs[3]);
	args[4] = (__u32)BPF_CORE_READ(regs, regs[4]);
	args[5] = (__u64)(__u32)BPF_CORE_READ(regs, regs[5]) << PAGE_SHIFT_32;
}

#endif /* MEMTOOLS_ARCH_SYSTEM_CALL_BPF_H */
