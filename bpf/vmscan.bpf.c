// SPDX-License-Identifier: BSD-2-Clause
/*
 * vmscan: time and events of page reclaim.
 *
 * Hooks: tracepoints of the groups vmscan and compaction, as raw tracepoints. From
 * 7.0 on a task can be preempted in a program on one of those, and the program is
 * skipped for all other tasks on that CPU meanwhile: there they are those of tracefs,
 * where that is mounted. The same programs do for both: user space
 * (tools/vmscan/attach.rs) gives them their type, and says by `by_record` which of the
 * two contexts they have. Of raw tracepoints' arguments
 * only such are read as are the same on all kernels from 5.10 to 7.2: the first
 * of mm_shrink_slab_start, the first and the third of mm_shrink_slab_end, the first
 * two of mm_compaction_finished. Those of mm_compaction_end have moved, and it has a
 * program for each order.
 *
 * What an operation took is added up when it ends. The totals only grow; user
 * space reads them every second and prints the difference. As kswapd can be at it for
 * many seconds, user space adds what its operation took so far, out of `calls`.
 */
#include "cgroup_path.bpf.h"
#include "event.bpf.h"
#include "histogram.bpf.h"
#include "filter.bpf.h"
#include "kernel_stack.bpf.h"
#include "reclaim.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* What is counted; the keys of `totals`. */
enum operation {
	OPERATION_SHRINK_SLAB,
	OPERATION_DIRECT_RECLAIM,
	OPERATION_MEMCG_RECLAIM,
	OPERATION_KSWAPD,
	OPERATION_COMPACTION,
	OPERATION_KSWAPD_WAKEUP, /* this one and the next take no time */
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

/* An operation that a thread is in. */
struct call {
	__u64 thread; /* as bpf_get_current_pid_tgid() returns it */
	__u32 operation;
	__u32 reserved;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, THREADS);
	__type(key, struct call);
	__type(value, __u64); /* since when */
} calls SEC(".maps");
EXPORT_TYPE(struct call);

/*
 * Shrinkers that a thread is in, outermost first. They nest where a shrinker
 * allocates: under drop_caches, for one, that may reclaim again. What reclaims is
 * not made to reclaim once more, so that two are as deep as it gets; the rest is
 * room for ends that did not reach us.
 */
#define SHRINK_DEPTH 4

struct shrink {
	__u64 shrinker;
	__u64 since_ns;
	__u64 level_ns; /* spent at this depth since the shrinker above was entered */
};

struct shrinks {
	struct shrink at[SHRINK_DEPTH + 1];
	__u64 depth;
};

const volatile struct shrinks no_shrinks;

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, THREADS);
	__type(key, __u64); /* thread */
	__type(value, struct shrinks);
} shrinking SEC(".maps");

/* With --by-shrinker, by the address of its function scan_objects. */
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

/* With --by-cgroup. */
struct cgroup_key {
	__u64 cgroup;  /* the task's, by its id in the version 2 hierarchy */
	__u64 limited; /* whose limit it reclaimed for, or 0 */
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

/* With --counts, by the number of the program: how often it ran. */
#define COUNTERS 64

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, COUNTERS);
	__type(key, __u32);
	__type(value, __u64);
} counts SEC(".maps");

/* What this kernel does not tell of a zone. */
#define PAGES_UNKNOWN	      (~0ULL)
#define FRAGMENTATION_UNKNOWN (-0x7fffffff)

/* With --trace-compaction: a compaction, of one zone of memory. */
struct compaction {
	__u64 time_ns; /* when it began, CLOCK_MONOTONIC */
	__u64 latency_ns;
	__u64 kernel_stack; /* an id in `stacks` */
	/* The zone's watermarks and free pages, before anything was moved. */
	__u64 min_pages;
	__u64 low_pages;
	__u64 high_pages;
	__u64 free_pages;
	__u64 cgroup; /* of the task; see cgroup_of_current() */
	__u32 pid;
	__u32 tid;
	__s32 order; /* of the pages that it is for; -1: all that can be had */
	__s32 node;
	__s32 fragmentation; /* the zone's index for this order, in thousandths */
	enum compact_result status;
	__u32 sync; /* it waits for pages that are being written, and for locks */
	__u32 reserved;
	char comm[COMM_BYTES];
	char zone[16];
};
EXPORT_TYPE(struct compaction);

const volatile struct compaction no_compaction = {
	.min_pages = PAGES_UNKNOWN,
	.low_pages = PAGES_UNKNOWN,
	.high_pages = PAGES_UNKNOWN,
	.free_pages = PAGES_UNKNOWN,
	.fragmentation = FRAGMENTATION_UNKNOWN,
};

/* By thread, while it is at it. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, THREADS);
	__type(key, __u64);
	__type(value, struct compaction);
} compacting SEC(".maps");

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

/* An operation took `latency_ns`, of which `time_ns` are not counted elsewhere. */
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

/* Not begun: it was not wanted, or began before we did. */
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

/* 7.2 and later: what kswapd does, and nothing else. */
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
 * Before that: from one wake-up to the next or to sleep. kswapd naps for up to
 * 0.1 s before it sleeps, and that is in it.
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

/* mm_vmscan_writepage or mm_vmscan_write_folio, whichever there is. */
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
	/* Else clang computes an address from the value before the test, which is not bounded. */
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
		/* A start or an end did not reach us, so nothing in here can be trusted. */
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

/* Sizes of free blocks that a zone has lists for: 11, or 14 with pages of 64 KiB. */
#define MAX_ORDERS 32

/*
 * The zone's fragmentation index for an order, as fragmentation_index() of mm/vmstat.c has it, in
 * thousandths: near 0 an allocation fails for lack of memory, near 1000 for fragmentation. -1000:
 * there is a block for it.
 */
static __noinline int fragmentation_index(struct zone *zone, int order)
{
	void *area = (void *)zone + bpf_core_field_offset(zone->free_area);
	__u32 orders = bpf_core_field_size(zone->free_area) / bpf_core_type_size(struct free_area);
	__u64 all = 0, pages = 0, suitable = 0;

	if (order < 0 || order >= MAX_ORDERS)
		return FRAGMENTATION_UNKNOWN;
	for (int i = 0; i < MAX_ORDERS; i++) {
		__u64 blocks;

		if (i >= orders)
			break;
		blocks = BPF_CORE_READ((struct free_area *)area, nr_free);
		all += blocks;
		pages += blocks << i;
		if (i >= order)
			suitable += blocks;
		area += bpf_core_type_size(struct free_area);
	}
	if (!all)
		return 0;
	if (suitable)
		return -1000;
	return 1000 - (int)((1000 + (pages * 1000 >> order)) / all);
}

static __noinline __u64 watermark(struct zone *zone, __u32 which)
{
	__u64 pages = 0;

	if (!bpf_core_field_exists(zone->_watermark) ||
	    !bpf_core_field_exists(zone->watermark_boost))
		return PAGES_UNKNOWN;
	bpf_core_read(&pages, sizeof(pages), &zone->_watermark[which & 3]);
	/* All of them are raised by it for a while after pages of different mobility were mixed. */
	return pages + BPF_CORE_READ(zone, watermark_boost);
}

static __noinline int read_zone_state(struct compaction *compaction, struct zone *zone)
{
	__u32 counter = bpf_core_enum_value(enum zone_stat_item, NR_FREE_PAGES);
	long pages = 0;

	compaction->min_pages = watermark(zone, WMARK_MIN);
	compaction->low_pages = watermark(zone, WMARK_LOW);
	compaction->high_pages = watermark(zone, WMARK_HIGH);
	bpf_core_read(&pages, sizeof(pages), &zone->vm_stat[counter]);
	/* What a CPU has taken and not yet told can exceed what there is. */
	compaction->free_pages = pages > 0 ? pages : 0;
	if (bpf_core_field_exists(zone->free_area))
		compaction->fragmentation = fragmentation_index(zone, compaction->order);
	return 0;
}

/*
 * Whether it is to go on: asked at least once in each, first before anything is moved. Here it is
 * told what it is about.
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
 * A program cannot ask which raw tracepoint has called it (before 6.10), so each
 * tracepoint of --counts gets one of its own. They are numbered in octal: count_00
 * to count_77.
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
