/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * PIDs and TIDs of tasks in a PID namespace.
 */
#ifndef MEMTOOLS_TASK_IDS_BPF_H
#define MEMTOOLS_TASK_IDS_BPF_H

#include "memtools.bpf.h"

#define PID_NAMESPACE_LEVELS 33 /* MAX_PID_NS_LEVEL, and the initial one */

/* PID and TID of a task in a PID namespace; 0 if the task is not in that namespace. */
struct task_ids {
	__u32 pid; /* the process */
	__u32 tid; /* the thread */
};

/*
 * Returns the number of a `struct pid` in the PID namespace with this inode (0: the initial
 * namespace). bpf_get_ns_current_pid_tgid() knows the number only for a task whose own namespace
 * this is, not for one in a container below. Returns 0 if the task is not in the namespace.
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

/* Returns the PID and TID of any task in the PID namespace with this inode. */
static __always_inline struct task_ids task_ids_in(struct task_struct *task, __u32 namespace)
{
	return (struct task_ids){
		.pid =
		    number_in_namespace(BPF_CORE_READ(task, group_leader, thread_pid), namespace),
		.tid = number_in_namespace(BPF_CORE_READ(task, thread_pid), namespace),
	};
}

#endif /* MEMTOOLS_TASK_IDS_BPF_H */
