/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Cause of the current task's memory reclaim.
 */
#ifndef MEMTOOLS_RECLAIM_BPF_H
#define MEMTOOLS_RECLAIM_BPF_H

#include "memtools.bpf.h"

/*
 * Returns the id of the memory cgroup whose limit the current task reclaims for; 0 if the task
 * reclaims for the machine, or not at all. The cgroup need not be the task's own: a limit also
 * covers all cgroups below.
 *
 * The tracepoints of kernels up to 6.18 do not report the cgroup. But on all kernels from 5.10 to
 * 7.2, the task's reclaim_state points into the scan_control of its reclaim, from before the
 * tracepoint of the beginning until after that of the end.
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
