/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Process that a block belongs to.
 */
#ifndef MEMTOOLS_MEMLEAK_PROCESS_BPF_H
#define MEMTOOLS_MEMLEAK_PROCESS_BPF_H

#include "current_task.bpf.h"
#include "task_ids.bpf.h"

/* Limit of a chain of processes that wait for each other's vfork(). */
#define VFORKS 4

/* Returns the process whose memory a child of vfork() uses until it calls exec or exits. */
static __noinline __u32 process_that_vforked(void)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task();

	for (int i = 0; i < VFORKS && BPF_CORE_READ(task, vfork_done); i++) {
		struct task_struct *parent = BPF_CORE_READ(task, real_parent);

		if (BPF_CORE_READ(parent, mm) != BPF_CORE_READ(task, mm))
			break;
		task = parent;
	}
	return ids_of(task).pid;
}

/* Whether the current task is a child of vfork() that uses its parent's memory. */
static __always_inline bool is_of_vfork(void)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task();

	return BPF_CORE_READ(task, vfork_done);
}

/*
 * Returns the process that a block belongs to, in the tool's PID namespace: the first process with
 * this address space. Not inline, to spare the stacks of the callers; global, so that the verifier
 * follows the function once and not again for each caller.
 */
__noinline __u32 process_of_current(void)
{
	struct task_ids ids = ids_of_current();

	/*
	 * The check takes some 100 ns: it is made only for the first thread of a process that may
	 * be such a child.
	 */
	if (ids.tid == ids.pid && flags_of_current() & PF_FORKNOEXEC && is_of_vfork())
		return process_that_vforked();
	return ids.pid;
}

#endif /* MEMTOOLS_MEMLEAK_PROCESS_BPF_H */
