/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Counts by process, user stack and kernel stack, kept in BPF maps: for events that are too
 * frequent to be sent one by one. src/run/count_stacks.rs reads them.
 */
#ifndef MEMTOOLS_STACK_COUNT_BPF_H
#define MEMTOOLS_STACK_COUNT_BPF_H

#include "cgroup_path.bpf.h"
#include "count.bpf.h"
#include "task_stack.bpf.h"
#include "kernel_stack.bpf.h"

/* Options, set before load. */
const volatile __u8 with_user_stacks = 1;
const volatile __u8 with_kernel_stacks;

struct stack_count_key {
	__u64 user; /* ids in `stacks`; STACK_NONE also if not requested */
	__u64 kernel;
	__u32 pid;
	__u32 reserved;
	char comm[16];
};

struct stack_count {
	__u64 events;
	__u64 bytes;
	__u64 cgroup; /* of the last event; see cgroup_of_current() */
};

/* First size of the maps; user space replaces them by larger ones (src/bpf/map_counts.rs). */
#define STACK_COUNTS 4096

COUNTS_OF_SIZES(counts, sizeof(struct stack_count_key), sizeof(struct stack_count), STACK_COUNTS);

const volatile struct stack_count no_count;

static __noinline struct stack_count *stack_count_of(const struct stack_count_key *key)
{
	struct stack_count *count;
	void *map;
	__u32 first = 0;

	map = bpf_map_lookup_elem(&counts, &first) ?: (void *)&counts_a;
	count = bpf_map_lookup_elem(map, key);
	if (count)
		return count;
	count = value_of(map, key, (const void *)&no_count);
	if (count)
		count_table_entry(TABLE_COUNTS);
	else
		count_loss(entries);
	return count;
}

static __noinline int stack_count_add(__u64 user, __u64 kernel, __u32 pid, __u64 bytes)
{
	struct stack_count_key key = { .user = user, .kernel = kernel, .pid = pid };
	struct stack_count *count;

	bpf_get_current_comm(key.comm, sizeof(key.comm));
	count = stack_count_of(&key);
	if (!count)
		return 0;
	__sync_fetch_and_add(&count->events, 1);
	__sync_fetch_and_add(&count->bytes, bytes);
	if (with_cgroups)
		count->cgroup = cgroup_of_current();
	return 0;
}

/*
 * Counts one event of the current task; `ctx` is the program's context. `interrupted` is 1 in
 * programs of perf events and kprobes.
 */
static __always_inline int count_stacks(void *ctx, __u64 interrupted, __u32 pid, __u64 bytes)
{
	__u64 kernel = with_kernel_stacks ? stack_of_kernel_from(ctx, interrupted) : STACK_NONE;
	__u64 user = with_user_stacks ? stack_of_task() : STACK_NONE;

	return stack_count_add(user, kernel, pid, bytes);
}

#endif /* MEMTOOLS_STACK_COUNT_BPF_H */
