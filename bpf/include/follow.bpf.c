// SPDX-License-Identifier: BSD-2-Clause
/*
 * Fills the map of followed processes (filter.bpf.h), which the object of the tool shares:
 * src/process/follow.rs.
 *
 * Hooks: sched_process_fork, before the child has run, and sched_process_free, when the last thread
 * of a process is freed. Each has several programs that do the same. From about 7.0 on the kernel
 * skips a program that is running on the same CPU already, for a task that was preempted in it; the
 * next program on the hook then does the work. On a busy system one call in thirty is skipped, so
 * the fork, which must be seen, has three programs.
 */
#include "filter.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/*
 * Adds a child of a traced process. New threads, too, come from fork; they belong to the process
 * that makes them.
 */
static __noinline int forked(struct bpf_raw_tracepoint_args *ctx)
{
	struct task_struct *child = (void *)ctx->args[1];
	struct task_struct *parent = (void *)bpf_get_current_task();
	__u64 process = filter_process_of(child);
	struct task_ids ids = ids_of_current();
	__u8 here = 1;

	if (process == filter_process_of(parent))
		return 0;
	if (filter_wants_pid(ids.pid) || filter_follows(parent)) {
		if (bpf_map_update_elem(&filter_followed, &process, &here, BPF_ANY))
			count_loss(processes);
	} else {
		/*
		 * The map may still have an earlier process at this address, whose entry could not
		 * be removed.
		 */
		bpf_map_delete_elem(&filter_followed, &process);
	}
	return 0;
}

SEC("raw_tp/sched_process_fork")
int process_fork(struct bpf_raw_tracepoint_args *ctx)
{
	return forked(ctx);
}

SEC("raw_tp/sched_process_fork")
int process_fork_too(struct bpf_raw_tracepoint_args *ctx)
{
	return forked(ctx);
}

SEC("raw_tp/sched_process_fork")
int process_fork_again(struct bpf_raw_tracepoint_args *ctx)
{
	return forked(ctx);
}

/* Removes a process. Its first thread is the last to be freed. */
static __noinline int freed(struct bpf_raw_tracepoint_args *ctx)
{
	struct task_struct *task = (void *)ctx->args[0];
	__u64 process = filter_process_of(task);

	if (BPF_CORE_READ(task, group_leader) == task)
		bpf_map_delete_elem(&filter_followed, &process);
	return 0;
}

SEC("raw_tp/sched_process_free")
int process_free(struct bpf_raw_tracepoint_args *ctx)
{
	return freed(ctx);
}

SEC("raw_tp/sched_process_free")
int process_free_too(struct bpf_raw_tracepoint_args *ctx)
{
	return freed(ctx);
}
