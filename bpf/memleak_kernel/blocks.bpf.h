/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Live blocks of the kernel, their sums, and the options that select them.
 */
#ifndef MEMTOOLS_MEMLEAK_KERNEL_BLOCKS_BPF_H
#define MEMTOOLS_MEMLEAK_KERNEL_BLOCKS_BPF_H

#include "arch_memory.bpf.h"
#include "filter.bpf.h"
#include "kernel_stack.bpf.h"

#define ENOENT 2
#define EEXIST 17

/* Kind of a block that is in no slab cache, or in an unknown one. */
enum kind {
	KIND_UNKNOWN, /* an object whose cache could not be found */
	KIND_PAGES,
	KIND_LARGE, /* a kmalloc beyond the largest cache, which takes whole pages */
	KIND_PER_CPU,
	KINDS,
};
EXPORT_TYPE(enum kind);

/* Tracepoints; those of frees are last. */
enum hook {
	HOOK_KMALLOC,
	HOOK_CACHE_ALLOC,
	HOOK_PAGE_ALLOC,
	HOOK_PERCPU_ALLOC,
	HOOK_FREES,
	HOOK_KFREE = HOOK_FREES,
	HOOK_CACHE_FREE,
	HOOK_PAGE_FREE,
	HOOK_PERCPU_FREE,
	HOOKS,
};

/*
 * Live block of kernel memory. The key of an object is its address; of per-CPU memory, the address
 * of its first copy; of pages, page_key().
 */
struct block {
	__u64 stack;
	__u64 time_ns;	 /* CLOCK_MONOTONIC at allocation */
	__u64 cache;	 /* its struct kmem_cache, or an enum kind */
	__u32 allocated; /* bytes taken; of pages that were freed in part, the bytes left */
	__u32 requested; /* bytes requested */
};
EXPORT_TYPE(struct block);

/* Sum of the blocks of one stack or, with by_cache, of one cache. */
struct total {
	__u64 allocated;
	__u64 requested;
	__u64 count;
};
EXPORT_TYPE(struct total);

enum cache_name {
	CACHE_NAME_BYTES = 32, /* with its NUL */
};
EXPORT_TYPE(enum cache_name);

struct cache {
	char name[CACHE_NAME_BYTES];
	__u64 wanted;
};
EXPORT_TYPE(struct cache);

/* Frees that were not seen, or could not be recorded: the memory was allocated again. */
__u64 unseen_frees;

/* Options, set before load. */
const volatile __u64 min_size;
const volatile __u64 max_size = ~0ULL;
const volatile __u32 sample_rate = 1;
const volatile __u32 page_shift = 12;
const volatile __u32 possible_cpus = 1;
const volatile __u8 keep_totals;
const volatile __u8 by_cache;
const volatile __u8 with_caches; /* the cache of each object is looked up */
const volatile __u8 with_pages;	 /* pages are recorded beside objects */
const volatile __u8 learns;	 /* page_bias is needed */
const volatile __u8 one_cache;	 /* only objects of the cache called cache_name */
const volatile char cache_name[CACHE_NAME_BYTES];

/* Facts that this kernel's tracepoints report, also set before load. */
const volatile __u8 tells_cache;	/* of kmem_cache_alloc: 6.1 and later */
const volatile __u8 tells_percpu_bytes; /* of percpu_alloc_percpu: 5.19 and later */

/*
 * Blocks by their keys. Memory for all entries is allocated when a map is created, as it cannot be
 * in the middle of the kernel's allocator. So user space adds larger maps as they are needed:
 * `blocks` is the first, and `more_blocks` has the next ones in their order. New blocks go to the
 * last map that has space. Sizes of keys and values alone: 6.1 does not take a map that is made
 * later, without types, instead of one with types.
 */
struct block_map {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__uint(key_size, sizeof(__u64));
	__uint(value_size, sizeof(struct block));
} blocks SEC(".maps");

enum block_maps {
	MORE_BLOCKS = 2, /* maps besides the first */
};
EXPORT_TYPE(enum block_maps);

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, MORE_BLOCKS);
	__type(key, __u32);
	__array(values, struct block_map);
} more_blocks SEC(".maps");

/* Blocks in all of these maps, less those that were removed, as each CPU has counted. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} live_blocks SEC(".maps");

static __always_inline void blocks_count(__u64 add)
{
	__u32 only = 0;
	__u64 *count = bpf_map_lookup_elem(&live_blocks, &only);

	/* Atomic: an interrupt can come in between. */
	if (count)
		__sync_fetch_and_add(count, add);
}

static __noinline struct block *block_find(__u64 key)
{
	struct block *block = bpf_map_lookup_elem(&blocks, &key);

	for (__u32 i = 0; i < MORE_BLOCKS && !block; i++) {
		__u32 number = i;
		void *map = bpf_map_lookup_elem(&more_blocks, &number);

		if (!map)
			break;
		block = bpf_map_lookup_elem(map, &key);
	}
	return block;
}

static __noinline long block_delete(__u64 key)
{
	long error = bpf_map_delete_elem(&blocks, &key);

	for (__u32 i = 0; i < MORE_BLOCKS && error == -ENOENT; i++) {
		__u32 number = i;
		void *map = bpf_map_lookup_elem(&more_blocks, &number);

		if (!map)
			break;
		error = bpf_map_delete_elem(map, &key);
	}
	if (!error)
		blocks_count(-1);
	return error;
}

/* Puts a block that is in no map into the last map that has space. */
static __noinline long block_put(__u64 key, const struct block *block)
{
	long error = -1;

	for (int i = MORE_BLOCKS - 1; i >= 0 && error; i--) {
		__u32 number = i;
		void *map = bpf_map_lookup_elem(&more_blocks, &number);

		if (map)
			error = bpf_map_update_elem(map, &key, block, BPF_NOEXIST);
	}
	if (error)
		error = bpf_map_update_elem(&blocks, &key, block, BPF_NOEXIST);
	if (!error)
		blocks_count(1);
	return error;
}

/* Sums by stack or, with by_cache, by cache; used with --combined-only. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64);
	__type(value, struct total);
} totals SEC(".maps");

const volatile struct total no_total;

/*
 * Freed pages of a block that was freed in part: a huge page that was split, the end of an
 * alloc_pages_exact(). The next task that is given these pages may not be traced, and then frees
 * them once more.
 */
#define PARTS_WORDS (1 << (PAGE_ORDERS - 1 - 6))

struct parts {
	__u64 freed[PARTS_WORDS]; /* a bit for each page */
};

const volatile struct parts no_parts;

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64);
	__type(value, struct parts);
} parts SEC(".maps");

/* Slab caches by the address of their struct kmem_cache. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, struct cache);
} caches SEC(".maps");

/*
 * Position of the struct page of an address: page_bias + the number of its page * the size of
 * struct page. No kernel gives that to BPF programs, and the kernel's variables for it are in
 * kallsyms on some kernels only. So it is learned: user space (tools/memleak/kernel/probes.rs)
 * makes a system call that allocates an object of 2^LEARN_ORDER pages, whose struct page comes with
 * mm_page_alloc and whose address with the kmalloc that follows. 0: not known.
 */
__u64 page_bias;
static __u64 learned_page;
#define LEARN_ORDER 2
/* Kernel memory maps begin at multiples of more than this, so page_bias is a multiple of this. */
#define BIAS_ALIGNMENT (1 << 20)

/* Number of `blocks` that are 2^order pages, so that orders without blocks are not searched. */
static __u64 live_pages[PAGE_ORDERS];

#define STRUCT_PAGE_BYTES ((__u64)bpf_core_type_size(struct page))

/* Before 5.17 struct page has what struct slab has in later kernels. */
struct page___slab {
	struct kmem_cache *slab_cache;
} __attribute__((preserve_access_index));

/* struct page of 7.2 and later */
struct page___info {
	unsigned long compound_info;
} __attribute__((preserve_access_index));

static __noinline int total_add(__u64 group, __u64 allocated, __u64 requested, __u64 count)
{
	struct total *total = value_of(&totals, &group, (const void *)&no_total);

	if (!total) {
		count_loss(entries);
		return 0;
	}
	__sync_fetch_and_add(&total->allocated, allocated);
	__sync_fetch_and_add(&total->requested, requested);
	__sync_fetch_and_add(&total->count, count);
	return 0;
}

static __always_inline __u64 group_of(const struct block *block)
{
	return by_cache ? block->cache : block->stack;
}

/*
 * Removes the block with this key. Returns 0 if there was none. Nobody else can change the block
 * meanwhile: memory whose free is reported is not free yet.
 */
static __noinline int block_remove(__u64 key)
{
	struct block *block = block_find(key);
	struct block removed;
	long error;

	if (!block)
		return 0;
	removed = *block;
	error = block_delete(key);
	if (error) {
		if (error != -ENOENT)
			__sync_fetch_and_add(&unseen_frees, 1);
		return 0;
	}
	if (keep_totals)
		total_add(group_of(&removed), -(__u64)removed.allocated, -(__u64)removed.requested,
			  -1);
	return 1;
}

/*
 * Returns the key of the block of 2^order pages that contains this page: struct page is aligned to
 * more than there are orders.
 */
static __always_inline __u64 page_key(__u64 page, __u32 order)
{
	return (page & -(STRUCT_PAGE_BYTES << order)) | order;
}

/* Returns the order of the block with this key, from page_key(). */
static __always_inline __u32 page_key_order(__u64 key)
{
	return key & (STRUCT_PAGE_BYTES - 1);
}

static __always_inline void pages_count(__u32 order, __u64 add)
{
	barrier_var(order);
	if (order < PAGE_ORDERS)
		__sync_fetch_and_add(&live_pages[order], add);
}

/* Forgets the parts of a block of 2^order pages that was removed. */
static __always_inline void pages_removed(__u64 key, __u32 order)
{
	pages_count(order, -1);
	if (order)
		bpf_map_delete_elem(&parts, &key);
}

/* Adds a block. Returns 0 if it could not be recorded. */
static __noinline int block_insert(__u64 key, const struct block *block)
{
	if (block_find(key)) {
		/* Memory that is allocated was free: its free was not seen. */
		__sync_fetch_and_add(&unseen_frees, 1);
		if (block_remove(key) && block->cache == KIND_PAGES)
			pages_removed(key, page_key_order(key));
	}
	if (block_put(key, block)) {
		count_loss(entries);
		return 0;
	}
	if (keep_totals)
		total_add(group_of(block), block->allocated, block->requested, 1);
	return 1;
}

static __always_inline bool wanted_size(__u64 size)
{
	if (size < min_size || size > max_size)
		return false;
	return sample_rate <= 1 || bpf_get_prandom_u32() % sample_rate == 0;
}

static __always_inline __u32 saturated(__u64 bytes)
{
	return bytes > ~0U ? ~0U : bytes;
}

/*
 * Records an allocation of the current task, which the options match. Returns 0 if the allocation
 * is not recorded.
 */
static __always_inline int remember(void *ctx, __u64 key, __u64 requested, __u64 allocated,
				    __u64 cache)
{
	struct block block = {
		.cache = cache,
		.allocated = saturated(allocated),
		.requested = saturated(requested),
	};

	if (!wanted_size(allocated))
		return 0;
	block.time_ns = bpf_ktime_get_ns();
	block.stack = stack_of_kernel(ctx);
	return block_insert(key, &block);
}

#endif /* MEMTOOLS_MEMLEAK_KERNEL_BLOCKS_BPF_H */
