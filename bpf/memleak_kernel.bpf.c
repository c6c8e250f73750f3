// SPDX-License-Identifier: BSD-2-Clause
/*
 * memleak's kernel mode: memory that the kernel allocated and has not freed, by
 * kernel stack or by slab cache.
 *
 * Hooks: the tracepoints of slab objects (kmalloc, kmem_cache_alloc, kfree, kmem_cache_free), of
 * pages (mm_page_alloc, mm_page_free) and of the per-CPU allocator. All are raw tracepoints: a
 * program on a tracepoint of perf is skipped where it interrupts any other, and much memory is
 * freed in interrupts. Even programs on raw tracepoints are skipped where they interrupt themselves
 * (6.1 and later), so each tracepoint has a second program; see TRACED. mm_page_free_batched
 * follows an mm_page_free of the same page on every kernel from 5.10 to 7.2, so it has no program
 * here.
 *
 * The kernel frees some objects in bulk, which no tracepoint reports. Where the kernel permits,
 * programs are attached to the functions that do so.
 *
 * The maps are preallocated: adding to them must not allocate, as it happens in the middle of an
 * allocation.
 */
#include "memleak_kernel/caches.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

static __always_inline int object_allocated(void *ctx, __u64 address, __u64 requested,
					    __u64 allocated, __u64 cache)
{
	struct task_ids ids;

	if (learns && !page_bias && allocated == 1ULL << (page_shift + LEARN_ORDER))
		learn(address);
	if (!address || !filter_wants(&ids))
		return 0;
	if (with_pages && page_bias)
		pages_become_objects(address);
	if (with_caches) {
		if (!cache)
			cache = cache_of(address, allocated);
		if (!cache_wanted(cache))
			return 0;
	}
	return remember(ctx, address, requested, allocated, cache);
}

/* State of a tracepoint's two programs on each CPU; see TRACED. */
struct program_pair {
	__u64 key;	      /* block for which the first was last called */
	__u64 second_runs;    /* 1: the second is running */
	__u64 harmless_skips; /* calls of the first while the second was running */
};
EXPORT_TYPE(struct program_pair);

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, HOOKS);
	__type(key, __u32); /* enum hook */
	__type(value, struct program_pair);
} program_pairs SEC(".maps");

static __always_inline void first_called(__u32 hook, __u64 key)
{
	struct program_pair *pair = bpf_map_lookup_elem(&program_pairs, &hook);

	if (pair) {
		pair->key = key;
		pair->harmless_skips += pair->second_runs;
	}
}

/* Whether the tracepoint's first program was skipped for this block. */
static __always_inline bool skipped(struct program_pair *pair, __u32 hook, __u64 key)
{
	if (pair->key == key)
		return false;
	/*
	 * If the block is recorded, the first was not skipped, but called again in an interrupt
	 * after that.
	 */
	return hook >= HOOK_FREES || !block_find(key);
}

/*
 * Defines the two programs of a tracepoint, of which the second is called after the first. A
 * program that an interrupt finds running is not called for events in that interrupt, and a softirq
 * may free thousands of objects; the second program then does the work of the first. Only an event
 * that finds both running is lost. The kernel counts how often the second was not called. If the
 * second alone was running, nothing is lost; such calls are subtracted as far as they can be known:
 * what remains is an upper bound.
 */
#define TRACED(name, hook, key)                                                                    \
	SEC("raw_tp")                                                                              \
	int name(struct bpf_raw_tracepoint_args *ctx)                                              \
	{                                                                                          \
		first_called(hook, key);                                                           \
		return on_##name(ctx);                                                             \
	}                                                                                          \
	SEC("raw_tp")                                                                              \
	int name##_nested(struct bpf_raw_tracepoint_args *ctx)                                     \
	{                                                                                          \
		__u32 index = hook;                                                                \
		struct program_pair *pair = bpf_map_lookup_elem(&program_pairs, &index);           \
                                                                                                   \
		if (!pair)                                                                         \
			return 0;                                                                  \
		pair->second_runs = 1;                                                             \
		if (skipped(pair, hook, key))                                                      \
			on_##name(ctx);                                                            \
		pair->second_runs = 0;                                                             \
		return 0;                                                                          \
	}

/* Handles kmalloc, and on 5.10 kmalloc_node. */
static __always_inline int on_kmalloc(struct bpf_raw_tracepoint_args *ctx)
{
	return object_allocated(ctx, ctx->args[1], ctx->args[2], ctx->args[3], 0);
}
TRACED(kmalloc, HOOK_KMALLOC, ctx->args[1])

/* Handles kmem_cache_alloc, and on 5.10 kmem_cache_alloc_node. */
static __always_inline int on_cache_alloc(struct bpf_raw_tracepoint_args *ctx)
{
	__u64 requested = ctx->args[2], allocated = ctx->args[3], cache = 0;

	if (tells_cache) {
		cache = ctx->args[2];
		requested = BPF_CORE_READ((struct kmem_cache *)cache, object_size);
		allocated = BPF_CORE_READ((struct kmem_cache *)cache, size);
	}
	return object_allocated(ctx, ctx->args[1], requested, allocated, cache);
}
TRACED(cache_alloc, HOOK_CACHE_ALLOC, ctx->args[1])

static __always_inline int on_kfree(struct bpf_raw_tracepoint_args *ctx)
{
	return block_remove(ctx->args[1]);
}
TRACED(kfree, HOOK_KFREE, ctx->args[1])

static __always_inline int on_cache_free(struct bpf_raw_tracepoint_args *ctx)
{
	return block_remove(ctx->args[1]);
}
TRACED(cache_free, HOOK_CACHE_FREE, ctx->args[1])

static __always_inline int on_page_alloc(struct bpf_raw_tracepoint_args *ctx)
{
	__u64 page = ctx->args[0];
	__u32 order = ctx->args[1];
	__u64 bytes = 1ULL << (page_shift + order % PAGE_ORDERS);
	struct task_ids ids;

	if (!page || order >= PAGE_ORDERS || !filter_wants(&ids))
		return 0;
	if (remember(ctx, page_key(page, order), bytes, bytes, KIND_PAGES))
		pages_count(order, 1);
	return 0;
}
TRACED(page_alloc, HOOK_PAGE_ALLOC, page_key(ctx->args[0], ctx->args[1] % PAGE_ORDERS))

static __always_inline int on_page_free(struct bpf_raw_tracepoint_args *ctx)
{
	__u64 page = ctx->args[0];
	__u32 order = ctx->args[1];

	if (order >= PAGE_ORDERS || pages_remove(page, order))
		return 0;
	for (__u32 i = 0; i < PAGE_ORDERS; i++)
		if (i > order && pages_shrink(page, i, order))
			break;
	return 0;
}
TRACED(page_free, HOOK_PAGE_FREE, page_key(ctx->args[0], ctx->args[1] % PAGE_ORDERS))

/*
 * Returns an argument of percpu_alloc_percpu, counted without the call site that newer kernels
 * have.
 */
static __always_inline __u64 percpu_argument(struct bpf_raw_tracepoint_args *ctx, int number)
{
	__u64 older = ctx->args[number], newer = ctx->args[number + 1];

	/*
	 * Without the barriers clang makes one load of both, at an address that the verifier cannot
	 * follow.
	 */
	barrier_var(older);
	barrier_var(newer);
	return tells_percpu_bytes ? newer : older;
}

/* Returns the address of the first copy of per-CPU memory. */
static __always_inline __u64 percpu_key(struct bpf_raw_tracepoint_args *ctx)
{
	return percpu_argument(ctx, 4) + (__u32)percpu_argument(ctx, 5);
}

static __always_inline int on_percpu_alloc(struct bpf_raw_tracepoint_args *ctx)
{
	__u64 size = percpu_argument(ctx, 2), allocated = size * possible_cpus;
	struct task_ids ids;

	if (tells_percpu_bytes)
		allocated = ctx->args[8];
	return filter_wants(&ids) ? remember(ctx, percpu_key(ctx), size, allocated, KIND_PER_CPU)
				  : 0;
}
TRACED(percpu_alloc, HOOK_PERCPU_ALLOC, percpu_key(ctx))

static __always_inline int on_percpu_free(struct bpf_raw_tracepoint_args *ctx)
{
	return block_remove(ctx->args[0] + (__u32)ctx->args[1]);
}
TRACED(percpu_free, HOOK_PERCPU_FREE, ctx->args[0] + (__u32)ctx->args[1])

/* Notes the tool's own pages, on mm_page_alloc while page_bias is learned. */
SEC("raw_tp")
int learn_page(struct bpf_raw_tracepoint_args *ctx)
{
	if ((__u32)ctx->args[1] == LEARN_ORDER && ids_of_current().pid == filter.own_pid)
		learned_page = ctx->args[0];
	return 0;
}

/*
 * Removes one object of a bulk free. Global, so that the verifier follows the function once and not
 * again for each object.
 */
__noinline int free_one_of(__u64 objects, __u32 i)
{
	__u64 address = 0;

	bpf_probe_read_kernel(&address, sizeof(address), (void *)objects + i * sizeof(address));
	return block_remove(address);
}

/* Limit of a bulk free: kfree_rcu() collects a page of pointers. */
#define BULK_MAX 512

static __always_inline int free_each_of(__u64 objects, __u64 count)
{
	if (count > BULK_MAX)
		__sync_fetch_and_add(&unseen_frees, 1);
	for (__u32 i = 0; i < BULK_MAX && i < count; i++)
		free_one_of(objects, i);
	return 0;
}

/*
 * Handles a bulk free. A kprobe, as fentry does not accept an array of pointers among the arguments
 * (5.10 and 6.1).
 */
SEC("kprobe/kmem_cache_free_bulk")
int bulk_free(struct pt_regs *ctx)
{
	return free_each_of(PT_REGS_PARM3(ctx), PT_REGS_PARM2(ctx));
}

/*
 * Handles kfree_rcu() on 6.18 and later: objects of some caches, of all caches in 7.x, then wait in
 * a sheaf, and no tracepoint reports their free.
 */
SEC("kprobe/__kfree_rcu_sheaf")
int rcu_free(struct pt_regs *ctx)
{
	return block_remove(PT_REGS_PARM2(ctx));
}
