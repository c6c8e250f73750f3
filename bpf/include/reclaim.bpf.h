/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * What the current task reclaims memory for.
 */
#ifndef MEMTOOLS_RECLAIM_BPF_H
#define MEMTOOLS_RECLAIM_BPF_H

#include "memtools.bpf.h"

/*
 * The memory cgroup whose limit the current task reclaims for, by its id; 0 if it
 * reclaims for the machine, or for none. That need not be the task's own: a limit is
 * also for all that is below it.
 *
 * The tracepoints of kernels up to 6.18 do not tell it. But from before that of the
 * beginning until after that of the end the task's reclaim_state points into the
 * scan_control of its reclaim, on all kernels from 5.10 to 7.2.
 */
static __noinline __u64 reclaim_limited_cgroup(void)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task();
	struct scan_control *control;
	struct reclaim_state *state;
	struct mem_cgroup *memcg;

	if (!bpf_core_field_exists(struct scan_control, target_mem_cgroup) ||
	    !bpf_core_field_exists(struct scan_control, reclaim_state) ||
	    !bpf_core_field_exists(struct mem_cgroup, css))
		return 0;
	state = BPF_CORE_READ(task, reclaim_state);
	if (!state)
		return 0;
	control = (void *)state - bpf_core_field_offset(struct scan_control, reclaim_state);
	memcg = BPF_CORE_READ(control, target_mem_cgroup);
	return memcg ? BPF_CORE_READ(memcg, css.cgroup, kn, id) : 0;
}

#endif /* MEMTOOLS_RECLAIM_BPF_H */
