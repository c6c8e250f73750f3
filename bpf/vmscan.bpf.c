// SPDX-License-Identifier: BSD-2-Clause
/*
 * vmscan: time and events of page reclaim.
 *
 * Hooks: tracepoints of the groups vmscan and compaction, as raw tracepoints. From 7.0 on a task
 * can be preempted in a program on a raw tracepoint, and the program is skipped for all other tasks
 * on that CPU meanwhile: these kernels get tracepoints of tracefs instead, where that is mounted.
 * Each program serves both kinds: user space (tools/vmscan/attach.rs) sets the program's type, and
 * says by `by_record` which of the two contexts the program has. Only the programs of
 * --trace-compaction are on raw tracepoints on all kernels, so that runs of them can be skipped
 * from 7.0 on: the record of mm_compaction_finished in tracefs lacks the pointer to the zone.
 *
 * Programs on raw tracepoints read only those arguments that are the same on all kernels from 5.10
 * to 7.2: the first of mm_shrink_slab_start, the first and the third of mm_shrink_slab_end,
 * the first two of mm_compaction_finished. The arguments of mm_compaction_end have moved, and it
 * has a program for each order.
 *
 * The duration of an operation is added up when the operation ends. The totals only grow; user
 * space reads them every second and prints the difference. As an operation of kswapd can last for
 * many seconds, user space adds its duration so far, out of `calls`.
 */

#include "vmscan/compaction.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/*
 * Limit of the shrinkers that a thread is in, outermost first. Shrinkers nest where a shrinker
 * allocates: under drop_caches, for one, that may reclaim again. A task that reclaims does not
 * begin to reclaim once more, so that the depth is two at most; the rest is space for ends that
 * were not seen.
 */
#define SHRINK_DEPTH 4

struct shrink {
	__u64 shrinker;
	__u64 since_ns;
	__u64 level_ns; /* time at this depth since the shrinker above began */
};

struct shrinks {
	struct shrink at[SHRINK_DEPTH + 1];
	__u64 depth;
};

const volatile struct shrinks no_shrinks;

BY_THREAD(shrinking, struct shrinks);

/* Totals of a shrinker, with --by-shrinker; the key is the address of its function scan_objects. */
struct shrinker_total {
	__u64 count;
	__u64 time_ns; /* without the time in other shrinkers */
	__u64 freed;   /* objects */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, __u64);
	__type(value, struct shrinker_total);
} shrinkers SEC(".maps");
EXPORT_TYPE(struct shrinker_total);

const volatile struct shrinker_total no_shrinker_total;

/* Capacity of the map of --counts: how often each program ran, by its number. */
#define COUNTERS 64

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, COUNTERS);
	__type(key, __u32);
	__type(value, __u64);
} counts SEC(".maps");

SEC("raw_tp/mm_vmscan_direct_reclaim_begin")
int direct_reclaim_begin(void *ctx)
{
	return begin(OPERATION_DIRECT_RECLAIM);
}

SEC("raw_tp/mm_vmscan_direct_reclaim_end")
int direct_reclaim_end(void *ctx)
{
	return end(OPERATION_DIRECT_RECLAIM);
}

SEC("raw_tp/mm_vmscan_memcg_reclaim_begin")
int memcg_reclaim_begin(void *ctx)
{
	return begin(OPERATION_MEMCG_RECLAIM);
}

SEC("raw_tp/mm_vmscan_memcg_reclaim_end")
int memcg_reclaim_end(void *ctx)
{
	return end(OPERATION_MEMCG_RECLAIM);
}

SEC("raw_tp/mm_compaction_begin")
int compaction_begin(void *ctx)
{
	return begin(OPERATION_COMPACTION);
}

SEC("raw_tp/mm_compaction_end")
int compaction_end(void *ctx)
{
	return end(OPERATION_COMPACTION);
}

/* kswapd on 7.2 and later: what kswapd does, and nothing else. */
SEC("raw_tp/mm_vmscan_balance_pgdat_begin")
int balance_begin(void *ctx)
{
	return begin(OPERATION_KSWAPD);
}

SEC("raw_tp/mm_vmscan_balance_pgdat_end")
int balance_end(void *ctx)
{
	return end(OPERATION_KSWAPD);
}

/*
 * kswapd before 7.2: from one wake-up to the next, or to sleep. kswapd naps for up to 0.1 s before
 * it sleeps; the nap is included.
 */
SEC("raw_tp/mm_vmscan_kswapd_wake")
int kswapd_wake(void *ctx)
{
	end(OPERATION_KSWAPD);
	return begin(OPERATION_KSWAPD);
}

SEC("raw_tp/mm_vmscan_kswapd_sleep")
int kswapd_sleep(void *ctx)
{
	return end(OPERATION_KSWAPD);
}

SEC("raw_tp/mm_vmscan_wakeup_kswapd")
int kswapd_wakeup(void *ctx)
{
	count_one(OPERATION_KSWAPD_WAKEUP);
	return 0;
}

/* mm_vmscan_writepage or mm_vmscan_write_folio, whichever the kernel has. */
SEC("raw_tp")
int write_page(void *ctx)
{
	count_one(OPERATION_WRITE_PAGE);
	return 0;
}

SEC("raw_tp/mm_shrink_slab_start")
int shrink_slab_start(void *ctx)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct shrinks *shrinks;
	struct shrink *shrink;
	__u64 depth;

	if (!wanted())
		return 0;
	shrinks = value_of(&shrinking, &thread, (const void *)&no_shrinks);
	if (!shrinks) {
		count_loss(calls);
		return 0;
	}
	depth = shrinks->depth;
	/*
	 * Without the barrier clang computes an address from the value before the test, which is
	 * not bounded.
	 */
	barrier_var(depth);
	if (depth >= SHRINK_DEPTH) {
		count_losses(calls, SHRINK_DEPTH);
		depth = 0;
	}
	shrinks->depth = depth + 1;
	shrink = &shrinks->at[depth];
	if (by_record)
		shrink->shrinker = (__u64)((struct trace_event_raw_mm_shrink_slab_start *)ctx)->shr;
	else
		shrink->shrinker = ((struct bpf_raw_tracepoint_args *)ctx)->args[0];
	shrink->since_ns = bpf_ktime_get_ns();
	shrink[1].level_ns = 0;
	return 0;
}

static __noinline int add_to_shrinker(struct shrinker *shrinker, __u64 time_ns, __u64 freed)
{
	__u64 function = (__u64)BPF_CORE_READ(shrinker, scan_objects);
	struct shrinker_total *total =
	    value_of(&shrinkers, &function, (const void *)&no_shrinker_total);

	if (!total) {
		count_loss(entries);
		return 0;
	}
	__sync_fetch_and_add(&total->count, 1);
	__sync_fetch_and_add(&total->time_ns, time_ns);
	__sync_fetch_and_add(&total->freed, freed);
	return 0;
}

SEC("raw_tp/mm_shrink_slab_end")
int shrink_slab_end(void *ctx)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct shrinks *shrinks = bpf_map_lookup_elem(&shrinking, &thread);
	__u64 depth, latency_ns, time_ns, shrinker;
	struct shrink *shrink;
	__u32 freed;

	if (!shrinks)
		return 0;
	if (by_record) {
		shrinker = (__u64)((struct trace_event_raw_mm_shrink_slab_end *)ctx)->shr;
		freed = ((struct trace_event_raw_mm_shrink_slab_end *)ctx)->retval;
	} else {
		shrinker = ((struct bpf_raw_tracepoint_args *)ctx)->args[0];
		freed = ((struct bpf_raw_tracepoint_args *)ctx)->args[2];
	}
	depth = --shrinks->depth;
	barrier_var(depth);
	if (depth >= SHRINK_DEPTH)
		return 0;
	shrink = &shrinks->at[depth];
	if (shrink->shrinker != shrinker) {
		/* A start or an end was not seen, so nothing in this record can be trusted. */
		bpf_map_delete_elem(&shrinking, &thread);
		count_loss(calls);
		return 0;
	}
	latency_ns = bpf_ktime_get_ns() - shrink->since_ns;
	time_ns = latency_ns - shrink[1].level_ns;
	shrink->level_ns += latency_ns;
	if (depth == 0)
		bpf_map_delete_elem(&shrinking, &thread);
	add(OPERATION_SHRINK_SLAB, latency_ns, time_ns);
	if (by_shrinker)
		add_to_shrinker((struct shrinker *)shrinker, time_ns, freed);
	return 0;
}

SEC("raw_tp/mm_compaction_begin")
int trace_compaction_begin(void *ctx)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct compaction *compaction;
	struct task_ids ids;

	if (!filter_wants(&ids))
		return 0;
	bpf_map_update_elem(&compacting, &thread, (const void *)&no_compaction, BPF_ANY);
	compaction = bpf_map_lookup_elem(&compacting, &thread);
	if (!compaction) {
		count_loss(calls);
		return 0;
	}
	compaction->pid = ids.pid;
	compaction->tid = ids.tid;
	compaction->cgroup = cgroup_of_current();
	bpf_get_current_comm(compaction->comm, sizeof(compaction->comm));
	compaction->time_ns = bpf_ktime_get_ns();
	return 0;
}

/*
 * Notes the zone and the order of a compaction. The kernel asks at least once in each compaction
 * whether it is finished, first before anything is moved.
 */
SEC("raw_tp/mm_compaction_finished")
int trace_compaction_zone(struct bpf_raw_tracepoint_args *ctx)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct compaction *compaction = bpf_map_lookup_elem(&compacting, &thread);
	struct zone *zone = (void *)ctx->args[0];

	if (!compaction || compaction->zone[0])
		return 0;
	compaction->order = ctx->args[1];
	if (bpf_core_field_exists(zone->node))
		compaction->node = BPF_CORE_READ(zone, node);
	bpf_probe_read_kernel_str(compaction->zone, sizeof(compaction->zone),
				  BPF_CORE_READ(zone, name));
	if (with_zone_state)
		read_zone_state(compaction, zone);
	return 0;
}

static __always_inline int compaction_ended(void *ctx, __u32 sync, __u32 status)
{
	__u64 thread = bpf_get_current_pid_tgid(), now = bpf_ktime_get_ns();
	struct compaction *compaction = bpf_map_lookup_elem(&compacting, &thread), *event;
	__u64 kernel_stack = STACK_NONE;

	if (!compaction)
		return 0;
	if (with_kernel_stacks)
		kernel_stack = stack_of_kernel(ctx);
	event = event_reserve(sizeof(*event));
	if (event) {
		__builtin_memcpy(event, compaction, sizeof(*event));
		event->latency_ns = now - event->time_ns;
		event->kernel_stack = kernel_stack;
		event->sync = sync;
		event->status = status;
		bpf_ringbuf_submit(event, 0);
	}
	bpf_map_delete_elem(&compacting, &thread);
	return 0;
}

/* 5.10: (zone_start, migrate_pfn, free_pfn, zone_end, sync, status) */
SEC("raw_tp/mm_compaction_end")
int trace_compaction_end_6(struct bpf_raw_tracepoint_args *ctx)
{
	return compaction_ended(ctx, ctx->args[4], ctx->args[5]);
}

/* 6.1: (cc, zone_start, zone_end, sync, status) */
SEC("raw_tp/mm_compaction_end")
int trace_compaction_end_5(struct bpf_raw_tracepoint_args *ctx)
{
	return compaction_ended(ctx, ctx->args[3], ctx->args[4]);
}

static __noinline int count_tracepoint(__u32 number)
{
	__u64 *count = bpf_map_lookup_elem(&counts, &number);

	if (count && wanted())
		__sync_fetch_and_add(count, 1);
	return 0;
}

/*
 * Defines a counting program. A program cannot ask which raw tracepoint has called it (before
 * 6.10), so each tracepoint of --counts gets a program of its own. The programs are numbered in
 * octal: count_00 to count_77.
 */
#define COUNTER(number)                                                                            \
	SEC("raw_tp")                                                                              \
	int count_##number(void *ctx)                                                              \
	{                                                                                          \
		return count_tracepoint(0##number);                                                \
	}
#define COUNTERS_OF_8(digit)                                                                       \
	COUNTER(digit##0)                                                                          \
	COUNTER(digit##1)                                                                          \
	COUNTER(digit##2)                                                                          \
	COUNTER(digit##3)                                                                          \
	COUNTER(digit##4)                                                                          \
	COUNTER(digit##5)                                                                          \
	COUNTER(digit##6)                                                                          \
	COUNTER(digit##7)

COUNTERS_OF_8(0)
COUNTERS_OF_8(1)
COUNTERS_OF_8(2)
COUNTERS_OF_8(3)
COUNTERS_OF_8(4)
COUNTERS_OF_8(5)
COUNTERS_OF_8(6)
COUNTERS_OF_8(7)
