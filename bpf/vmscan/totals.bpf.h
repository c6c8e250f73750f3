/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Counts and durations of the operations of reclaim, in total and by cgroup, and the options of
 * vmscan.
 */
#ifndef MEMTOOLS_VMSCAN_TOTALS_BPF_H
#define MEMTOOLS_VMSCAN_TOTALS_BPF_H

#include "cgroup_path.bpf.h"
#include "event.bpf.h"
#include "histogram.bpf.h"
#include "filter.bpf.h"
#include "kernel_stack.bpf.h"
#include "reclaim.bpf.h"

/* Operations that are counted; the keys of `totals`. */
enum operation {
	OPERATION_SHRINK_SLAB,
	OPERATION_DIRECT_RECLAIM,
	OPERATION_MEMCG_RECLAIM,
	OPERATION_KSWAPD,
	OPERATION_COMPACTION,
	OPERATION_KSWAPD_WAKEUP, /* this one and the next have no duration */
	OPERATION_WRITE_PAGE,
	OPERATIONS,
};
EXPORT_TYPE(enum operation);

struct total {
	__u64 count;
	__u64 time_ns;
	struct histogram latency_ns;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, OPERATIONS);
	__type(key, __u32); /* enum operation */
	__type(value, struct total);
} totals SEC(".maps");
EXPORT_TYPE(struct total);

/* Operation that a thread is in. */
struct call {
	__u64 thread; /* as bpf_get_current_pid_tgid() returns it */
	__u32 operation;
	__u32 reserved;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, THREADS);
	__type(key, struct call);
	__type(value, __u64); /* when it began */
} calls SEC(".maps");
EXPORT_TYPE(struct call);

/* Key of the totals by cgroup, with --by-cgroup. */
struct cgroup_key {
	__u64 cgroup;  /* the task's, by its id in the version 2 hierarchy */
	__u64 limited; /* whose limit the task reclaimed for, or 0 */
	__u32 operation;
	__u32 reserved;
};

struct cgroup_total {
	__u64 count;
	__u64 time_ns;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, struct cgroup_key);
	__type(value, struct cgroup_total);
} cgroups SEC(".maps");
EXPORT_TYPE(struct cgroup_key);
EXPORT_TYPE(struct cgroup_total);

const volatile struct cgroup_total no_cgroup_total;

/* Options, set before load. */
const volatile __u8 by_shrinker;
const volatile __u8 by_cgroup;
const volatile __u8 by_record; /* programs' contexts are records of tracepoints */
const volatile __u8 with_kernel_stacks;
const volatile __u8 with_zone_state;

static __always_inline bool wanted(void)
{
	struct task_ids ids;

	return filter_wants(&ids);
}

static __always_inline struct total *total_of(__u32 operation)
{
	return bpf_map_lookup_elem(&totals, &operation);
}

static __always_inline void count_one(__u32 operation)
{
	struct total *total = total_of(operation);

	if (total && wanted())
		__sync_fetch_and_add(&total->count, 1);
}

static __noinline int add_to_cgroup(__u32 operation, __u64 time_ns)
{
	struct cgroup_key key = {
		.cgroup = cgroup_of_current(),
		.limited = reclaim_limited_cgroup(),
		.operation = operation,
	};
	struct cgroup_total *total = value_of(&cgroups, &key, (const void *)&no_cgroup_total);

	if (!total) {
		count_loss(entries);
		return 0;
	}
	__sync_fetch_and_add(&total->count, 1);
	__sync_fetch_and_add(&total->time_ns, time_ns);
	return 0;
}

/* Adds an operation that took `latency_ns`, of which `time_ns` are not counted elsewhere. */
static __noinline int add(__u32 operation, __u64 latency_ns, __u64 time_ns)
{
	struct total *total = total_of(operation);

	if (!total)
		return 0;
	__sync_fetch_and_add(&total->count, 1);
	__sync_fetch_and_add(&total->time_ns, time_ns);
	histogram_add(&total->latency_ns, latency_ns);
	if (by_cgroup)
		add_to_cgroup(operation, time_ns);
	return 0;
}

static __noinline int begin(__u32 operation)
{
	struct call call = {
		.thread = bpf_get_current_pid_tgid(),
		.operation = operation,
	};
	__u64 now = bpf_ktime_get_ns();

	if (wanted() && bpf_map_update_elem(&calls, &call, &now, BPF_ANY))
		count_loss(calls);
	return 0;
}

/*
 * Ends an operation. One without a beginning did not match the options, or began before the tool
 * was attached.
 */
static __noinline int end(__u32 operation)
{
	struct call call = {
		.thread = bpf_get_current_pid_tgid(),
		.operation = operation,
	};
	__u64 *since = bpf_map_lookup_elem(&calls, &call);
	__u64 time_ns;

	if (!since)
		return 0;
	time_ns = bpf_ktime_get_ns() - *since;
	bpf_map_delete_elem(&calls, &call);
	return add(operation, time_ns, time_ns);
}

#endif /* MEMTOOLS_VMSCAN_TOTALS_BPF_H */
