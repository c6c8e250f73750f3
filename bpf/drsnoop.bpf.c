// SPDX-License-Identifier: BSD-2-Clause
/*
 * drsnoop: tasks that had to reclaim memory themselves before they were given
 * any, and how long that took.
 *
 * Hooks: mm_vmscan_direct_reclaim_begin and _end, with --memcg also mm_vmscan_memcg_reclaim_begin
 * and _end, as raw tracepoints. From 7.0 on a task can be preempted in a program on a raw
 * tracepoint, and the program is skipped for all other tasks on that CPU meanwhile: these kernels
 * get tracepoints of tracefs instead, where that is mounted. The arguments of raw tracepoints come
 * by position, and 7.2 swaps the two of begin. User space looks up in the kernel's BTF which of
 * them is the gfp_t (`gfp_first`); the end's first argument is the number of pages on all kernels.
 */
#include "cgroup_path.bpf.h"
#include "event.bpf.h"
#include "filter.bpf.h"
#include "kernel_stack.bpf.h"
#include "reclaim.bpf.h"
#include "task_stack.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

enum reclaim_kind {
	RECLAIM_DIRECT, /* the machine, or a node, is short of free pages */
	RECLAIM_MEMCG,	/* a memory cgroup is at its limit */
};

struct event {
	__u64 time_ns; /* CLOCK_MONOTONIC at the end */
	__u64 latency_ns;
	__u64 reclaimed_pages;
	__u64 free_pages; /* of the whole machine, at the beginning */
	__u64 cgroup;	  /* the task's, as cgroup_of_current() returns it */
	__u64 limited;	  /* whose limit the task reclaimed for, or 0 */
	__u64 kernel_stack;
	__u64 user_stack;
	__u32 gfp_flags;
	__s32 order;
	__u32 pid;
	__u32 tid;
	__u32 uid;
	enum reclaim_kind kind;
	char comm[COMM_BYTES];
};
EXPORT_TYPE(struct event);

/* Reclaim that a thread is in. The two kinds do not nest. */
struct reclaim {
	__u64 since_ns;
	__u64 free_pages;
	__u32 gfp_flags;
	__s32 order;
};

BY_THREAD(reclaims, struct reclaim);

/* Options, set before load. */
const volatile __u32 only_uid;
const volatile __u8 by_uid;
const volatile __u8 gfp_first;
const volatile __u8 want_free_pages;
const volatile __u8 want_stacks;

/* Limit of the zones of the machine: up to 4 on each of its NUMA nodes. */
#define MAX_ZONES 256

/*
 * Returns the free pages of the whole machine, NR_FREE_PAGES of /proc/vmstat.
 *
 * The global counter has no BTF, and its address is known only on kernels with CONFIG_KALLSYMS_ALL.
 * But the counter is the sum of the zones' counters; the zones are all in the fallback list of any
 * node; and the task's memory cgroup leads to a node.
 */
static __noinline __u64 free_pages(void)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task();
	__u32 memory = bpf_core_enum_value(enum cgroup_subsys_id, memory_cgrp_id);
	__u32 counter = bpf_core_enum_value(enum zone_stat_item, NR_FREE_PAGES);
	__u32 node = bpf_get_numa_node_id();
	struct css_set *cgroups = BPF_CORE_READ(task, cgroups);
	struct cgroup_subsys_state *css = NULL;
	struct mem_cgroup_per_node *info = NULL;
	struct mem_cgroup *memcg;
	struct pglist_data *pgdat;
	struct zoneref *ref;
	__u64 sum = 0;

	bpf_core_read(&css, sizeof(css), &cgroups->subsys[memory]);
	if (!css) /* cgroup_disable=memory */
		return UNKNOWN;
	memcg = (void *)css - bpf_core_field_offset(struct mem_cgroup, css);
	bpf_core_read(&info, sizeof(info), &memcg->nodeinfo[node]);
	pgdat = BPF_CORE_READ(info, lruvec.pgdat);
	if (!pgdat)
		return UNKNOWN;
	ref = (void *)pgdat + bpf_core_field_offset(pgdat->node_zonelists);
	for (__u32 i = 0; i < MAX_ZONES; i++) {
		struct zone *zone = BPF_CORE_READ(ref, zone);
		long pages = 0;

		if (!zone)
			return sum;
		bpf_core_read(&pages, sizeof(pages), &zone->vm_stat[counter]);
		/*
		 * The counter can be negative while CPUs have changes that they have not yet added
		 * to it.
		 */
		if (pages > 0)
			sum += pages;
		ref = (void *)ref + bpf_core_type_size(struct zoneref);
	}
	return UNKNOWN;
}

static __always_inline int begin(__u32 gfp_flags, __s32 order)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct reclaim reclaim = {};
	struct task_ids ids;

	if (!filter_wants(&ids))
		return 0;
	if (by_uid && (__u32)bpf_get_current_uid_gid() != only_uid)
		return 0;
	reclaim.gfp_flags = gfp_flags;
	reclaim.order = order;
	reclaim.free_pages = want_free_pages ? free_pages() : UNKNOWN;
	reclaim.since_ns = bpf_ktime_get_ns();
	begin_call(&reclaims, thread, &reclaim);
	return 0;
}

static __always_inline int end(void *ctx, __u64 pages, enum reclaim_kind kind)
{
	__u64 now = bpf_ktime_get_ns();
	__u64 thread = bpf_get_current_pid_tgid();
	struct reclaim *reclaim = bpf_map_lookup_elem(&reclaims, &thread);
	__u64 kernel_stack = 0, user_stack = 0;
	struct event *event;
	struct task_ids ids;

	if (!reclaim) /* does not match the options, or begun before the tool was attached */
		return 0;
	if (want_stacks) {
		kernel_stack = stack_of_kernel(ctx);
		user_stack = stack_of_task();
	}
	event = event_reserve(sizeof(*event));
	if (event) {
		ids = ids_of_current();
		event->time_ns = now;
		event->latency_ns = now - reclaim->since_ns;
		event->reclaimed_pages = pages;
		event->free_pages = reclaim->free_pages;
		event->cgroup = cgroup_of_current();
		event->limited = reclaim_limited_cgroup();
		event->kernel_stack = kernel_stack;
		event->user_stack = user_stack;
		event->gfp_flags = reclaim->gfp_flags;
		event->order = reclaim->order;
		event->pid = ids.pid;
		event->tid = ids.tid;
		event->uid = bpf_get_current_uid_gid();
		event->kind = kind;
		bpf_get_current_comm(event->comm, sizeof(event->comm));
		bpf_ringbuf_submit(event, 0);
	}
	bpf_map_delete_elem(&reclaims, &thread);
	return 0;
}

static __always_inline int begin_by_position(struct bpf_raw_tracepoint_args *ctx)
{
	__u64 first = ctx->args[0], second = ctx->args[1];

	return gfp_first ? begin(first, second) : begin(second, first);
}

#define RECLAIM(kind, name)                                                                        \
	SEC("tracepoint/vmscan/mm_vmscan_" #name "_reclaim_begin")                                 \
	int name##_begin(struct trace_event_raw_mm_vmscan_direct_reclaim_begin_template *ctx)      \
	{                                                                                          \
		return begin(ctx->gfp_flags, ctx->order);                                          \
	}                                                                                          \
	SEC("tracepoint/vmscan/mm_vmscan_" #name "_reclaim_end")                                   \
	int name##_end(struct trace_event_raw_mm_vmscan_direct_reclaim_end_template *ctx)          \
	{                                                                                          \
		return end(ctx, ctx->nr_reclaimed, kind);                                          \
	}                                                                                          \
	SEC("raw_tp/mm_vmscan_" #name "_reclaim_begin")                                            \
	int name##_begin_raw(struct bpf_raw_tracepoint_args *ctx)                                  \
	{                                                                                          \
		return begin_by_position(ctx);                                                     \
	}                                                                                          \
	SEC("raw_tp/mm_vmscan_" #name "_reclaim_end")                                              \
	int name##_end_raw(struct bpf_raw_tracepoint_args *ctx)                                    \
	{                                                                                          \
		return end(ctx, ctx->args[0], kind);                                               \
	}

RECLAIM(RECLAIM_DIRECT, direct)
RECLAIM(RECLAIM_MEMCG, memcg)
