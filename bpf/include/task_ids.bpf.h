/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * By what numbers tasks are known in a PID namespace.
 */
#ifndef MEMTOOLS_TASK_IDS_BPF_H
#define MEMTOOLS_TASK_IDS_BPF_H

#include "memtools.bpf.h"

#define PID_NAMESPACE_LEVELS 33 /* MAX_PID_NS_LEVEL, and the initial one */

/* A task's numbers in a PID namespace; 0 where it has none there. */
struct task_ids {
	__u32 pid; /* the process */
	__u32 tid; /* the thread */
};

/*
 * A number of the kernel's as the PID namespace with this inode has it; 0: the
 * initial one. bpf_get_ns_current_pid_tgid() knows it only of a task whose own
 * namespace that is, not of one in a container below.
 */
static __noinline __u32 number_in_namespace(struct pid *pid, __u32 namespace)
{
	__u32 level = BPF_CORE_READ(pid, level);
	struct upid *numbers = (void *)pid + bpf_core_field_offset(pid->numbers);

	if (!namespace)
		return BPF_CORE_READ(numbers, nr);
	for (__u32 i = 0; i < PID_NAMESPACE_LEVELS && i <= level; i++)
		if (BPF_CORE_READ(&numbers[i], ns, ns.inum) == namespace)
			return BPF_CORE_READ(&numbers[i], nr);
	return 0;
}

/* The numbers of any task. */
static __always_inline struct task_ids task_ids_in(struct task_struct *task, __u32 namespace)
{
	return (struct task_ids){
		.pid =
		    number_in_namespace(BPF_CORE_READ(task, group_leader, thread_pid), namespace),
		.tid = number_in_namespace(BPF_CORE_READ(task, thread_pid), namespace),
	};
}

#endif /* MEMTOOLS_TASK_IDS_BPF_H */
