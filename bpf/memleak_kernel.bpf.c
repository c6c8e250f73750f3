// SPDX-License-Identifier: BSD-2-Clause
/*
 * memleak's kernel mode: memory that the kernel allocated and has not freed, by
 * kernel stack or by slab cache.
 *
 * Hooks: the tracepoints of slab objects (kmalloc, kmem_cache_alloc, kfree,
 * kmem_cache_free), of pages (mm_page_alloc, mm_page_free) and of the per-CPU
 * allocator. All are raw tracepoints: a program on one of perf's is skipped
 * where it interrupts any other, and much is freed in interrupts. Even these are
 * skipped where they interrupt themselves (6.1 and later), so each tracepoint has
 * a second program; see TRACED. mm_page_free_batched follows an mm_page_free of the
 * same page on every kernel from 5.10 to 7.2, so it has no program here.
 *
 * The kernel frees some objects in bulk, which no tracepoint tells. Where it
 * lets us, there are programs on the functions that do so.
 *
 * The maps are preallocated: what fills them must not allocate, for it runs in
 * the middle of an allocation.
 */
#include "filter.bpf.h"
#include "kernel_stack.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define ENOENT 2
#define EEXIST 17

/* What a block is, where it is in no slab cache. */
enum kind {
	KIND_UNKNOWN, /* an object whose cache could not be found */
	KIND_PAGES,
	KIND_LARGE, /* a kmalloc beyond the largest cache, which takes whole pages */
	KIND_PER_CPU,
	KINDS,
};
EXPORT_TYPE(enum kind);

/* Tracepoints, those of frees last. */
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
 * Memory in use. The key of an object is its address; of per-CPU memory, its
 * first copy's; of pages, page_key().
 */
struct block {
	__u64 stack;
	__u64 time_ns;	 /* CLOCK_MONOTONIC at allocation */
	__u64 cache;	 /* its struct kmem_cache, or an enum kind */
	__u32 allocated; /* bytes taken; of pages that were freed in part, what is left */
	__u32 requested; /* bytes asked for */
};
EXPORT_TYPE(struct block);

/* Blocks of one stack or, with by_cache, of one cache. */
struct total {
	__u64 allocated;
	__u64 requested;
	__u64 count;
};
EXPORT_TYPE(struct total);

#define PAGE_ORDERS 12 /* and one more than the largest of any x86-64 kernel */

#define CACHE_NAME_BYTES 32

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
const volatile __u8 with_caches; /* each object's cache is to be known */
const volatile __u8 with_pages;	 /* beside objects */
const volatile __u8 learns;	 /* page_bias is of use */
const volatile __u8 one_cache;	 /* only objects of the cache called cache_name */
const volatile char cache_name[CACHE_NAME_BYTES];

/* Of this kernel's tracepoints, also set before load. */
const volatile __u8 tells_cache;	/* kmem_cache_alloc: 6.1 and later */
const volatile __u8 tells_percpu_bytes; /* percpu_alloc_percpu: 5.19 and later */

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1); /* --max-allocs */
	__type(key, __u64);
	__type(value, struct block);
} blocks SEC(".maps");

/* By stack or, with by_cache, by cache; used with --combined-only. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64);
	__type(value, struct total);
} totals SEC(".maps");

const volatile struct total no_total;

/*
 * Which of a block's pages were freed, where not all are: a huge page that was
 * split, the end of an alloc_pages_exact(). Who gets these pages next may not be
 * traced, and then gives them back.
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
 * Where the struct page of an address is: page_bias + the number of its page *
 * the size of struct page. No kernel tells that to BPF programs, and its
 * variables are in kallsyms on some only. So it is learned: user space
 * (tools/memleak/kernel/probes.rs) makes a system call that allocates an object
 * of LEARN_ORDER pages, whose struct page comes with mm_page_alloc and whose
 * address with the kmalloc that follows. 0: not known.
 */
__u64 page_bias;
static __u64 learned_page;
#define LEARN_ORDER 2
/* Kernel memory maps begin at multiples of more than this, so page_bias is one. */
#define BIAS_ALIGNMENT (1 << 20)

/* How many of `blocks` are 2^order pages, so that nobody looks for what cannot be there. */
static __u64 live_pages[PAGE_ORDERS];

/* Kernels before 5.17 have what is struct slab since in struct page. */
struct page___slab {
	struct kmem_cache *slab_cache;
} __attribute__((preserve_access_index));

/* 7.2 and later */
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
 * Forget the block with this key. Returns 0 if there was none. Nobody else can
 * change it meanwhile: what is told to be freed is not free yet.
 */
static __noinline int block_remove(__u64 key)
{
	struct block *block = bpf_map_lookup_elem(&blocks, &key);
	struct block removed;
	long error;

	if (!block)
		return 0;
	removed = *block;
	error = bpf_map_delete_elem(&blocks, &key);
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

/* Returns 0 if it could not be recorded. */
static __noinline int block_insert(__u64 key, const struct block *block)
{
	long error = bpf_map_update_elem(&blocks, &key, block, BPF_NOEXIST);

	if (error == -EEXIST) {
		/* What is allocated was free: we have not seen that. */
		__sync_fetch_and_add(&unseen_frees, 1);
		block_remove(key);
		error = bpf_map_update_elem(&blocks, &key, block, BPF_ANY);
	}
	if (error) {
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

/* Remember what the current task, which is wanted, has allocated. Returns 0 if it is not. */
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

#define STRUCT_PAGE_BYTES ((__u64)bpf_core_type_size(struct page))

/* struct page is aligned to more than there are orders. */
static __always_inline __u64 page_key(__u64 page, __u32 order)
{
	return (page & -(STRUCT_PAGE_BYTES << order)) | order;
}

static __always_inline __u64 page_of(__u64 address)
{
	return page_bias + (address >> page_shift) * STRUCT_PAGE_BYTES;
}

/* Whether any block is so many pages. */
static __always_inline bool pages_live(__u32 order)
{
	/* Else clang adds to the address what it knows to be bounded, and the verifier does not. */
	barrier_var(order);
	return order < PAGE_ORDERS && live_pages[order];
}

static __always_inline void pages_count(__u32 order, __u64 add)
{
	barrier_var(order);
	if (order < PAGE_ORDERS)
		__sync_fetch_and_add(&live_pages[order], add);
}

/*
 * Forget the 2^order pages that this one is of. Returns 0 if they are not there.
 *
 * This and the functions on pages below are global, so that the verifier follows
 * each once and not again for each order: 5.10 and 6.1 would take minutes.
 */
__noinline int pages_remove(__u64 page, __u32 order)
{
	__u64 key = page_key(page, order);

	if (!pages_live(order) || !block_remove(key))
		return 0;
	pages_count(order, -1);
	if (order)
		bpf_map_delete_elem(&parts, &key);
	return 1;
}

/* Pages that the slab allocator took count as the objects that are in them. */
static __noinline int pages_become_objects(__u64 address)
{
	__u64 page = page_of(address);

	for (__u32 order = 0; order < PAGE_ORDERS; order++)
		if (pages_remove(page, order))
			break;
	return 0;
}

/* Mark 64 of the block's pages, or those of `bits`, as freed. Returns 0 if they were already. */
__noinline int parts_mark(__u64 key, __u32 word, __u64 bits)
{
	struct parts *part = bpf_map_lookup_elem(&parts, &key);

	barrier_var(word);
	if (!part || word >= PARTS_WORDS || part->freed[word] & bits)
		return 0;
	/* An addition, since 5.10 has no other atomic operation; none of the bits is set. */
	__sync_fetch_and_add(&part->freed[word], bits);
	return 1;
}

/* The same with 64 that may be beside so many from the first. */
__noinline int parts_mark_within(__u64 key, __u32 word, __u32 first, __u32 pages)
{
	return word * 64 >= first && word * 64 < first + pages ? parts_mark(key, word, ~0ULL) : 0;
}

/* Mark so many from the first as freed. */
static __always_inline int parts_mark_all(__u64 key, __u32 first, __u32 pages)
{
	int marked = 0;

	if (pages < 64)
		return parts_mark(key, first / 64, ((1ULL << pages) - 1) << (first & 63));
	for (__u32 word = 0; word < PARTS_WORDS; word++)
		marked |= parts_mark_within(key, word, first, pages);
	return marked;
}

/*
 * 2^freed pages from this one on are freed, of 2^order that were allocated
 * together. Returns 0 if those are not there.
 */
__noinline int pages_shrink(__u64 page, __u32 order, __u32 freed)
{
	__u64 key = page_key(page, order), bytes = 1ULL << (page_shift + freed % PAGE_ORDERS);
	struct block *block;

	if (!pages_live(order))
		return 0;
	block = bpf_map_lookup_elem(&blocks, &key);
	if (!block)
		return 0;
	bpf_map_update_elem(&parts, &key, (const void *)&no_parts, BPF_NOEXIST);
	if (!bpf_map_lookup_elem(&parts, &key)) {
		count_loss(entries);
		return 0;
	}
	if (!parts_mark_all(key, (page - (key - order)) / STRUCT_PAGE_BYTES,
			    1 << freed % PAGE_ORDERS))
		return 0;
	__sync_fetch_and_add(&block->allocated, -(__u32)bytes);
	__sync_fetch_and_add(&block->requested, -(__u32)bytes);
	if (keep_totals)
		total_add(group_of(block), -bytes, -bytes, 0);
	if (*(volatile __u32 *)&block->allocated == 0)
		pages_remove(page, order);
	return 1;
}

/* The first of the pages that this one was allocated with: they are one slab. */
static __noinline __u64 head_of(__u64 page)
{
	__u64 info;

	if (bpf_core_field_exists(struct page___info, compound_info)) {
		info = BPF_CORE_READ((struct page___info *)page, compound_info);
		/* A mask of the address's upper bits, where the size of struct page allows it. */
		if (info & 1 && (__s64)info > -(1LL << 32))
			return page & info;
	} else {
		info = BPF_CORE_READ((struct page *)page, compound_head);
	}
	return info & 1 ? info - 1 : page;
}

/* The slab cache of an object, or what it is instead. */
static __noinline __u64 cache_of(__u64 address, __u64 allocated)
{
	__u64 head;

	/* The largest cache of kmalloc has objects of two pages. */
	if (allocated > 2ULL << page_shift)
		return KIND_LARGE;
	if (!page_bias)
		return KIND_UNKNOWN;
	head = head_of(page_of(address));
	if (bpf_core_type_exists(struct slab))
		return (__u64)BPF_CORE_READ((struct slab *)head, slab_cache);
	return (__u64)BPF_CORE_READ((struct page___slab *)head, slab_cache);
}

static __noinline int is_the_one(const struct cache *cache)
{
	for (int i = 0; i < CACHE_NAME_BYTES; i++)
		if (cache->name[i] != cache_name[i])
			return 0;
	return 1;
}

/* Whether the options ask for objects of this cache, whose name is known then. */
static __noinline int cache_wanted(__u64 address)
{
	struct cache *cache, new = {};

	if (address < KINDS)
		return !one_cache;
	cache = bpf_map_lookup_elem(&caches, &address);
	if (cache)
		return cache->wanted;
	bpf_probe_read_kernel_str(new.name, sizeof(new.name),
				  BPF_CORE_READ((struct kmem_cache *)address, name));
	new.wanted = !one_cache || is_the_one(&new);
	if (bpf_map_update_elem(&caches, &address, &new, BPF_ANY))
		count_loss(entries);
	return new.wanted;
}

/* The tool has allocated the pages at this address, and learn_page() has seen them. */
static __noinline int learn(__u64 address)
{
	__u64 bias = learned_page - (address >> page_shift) * STRUCT_PAGE_BYTES;

	/* Unless an interrupt allocated as many in between. */
	if (learned_page && bias % BIAS_ALIGNMENT == 0 && ids_of_current().pid == filter.own_pid)
		page_bias = bias;
	return 0;
}

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

/* On each CPU, a tracepoint's two programs; see TRACED. */
struct program_pair {
	__u64 key;	      /* for which the first was last called */
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

/* Whether the tracepoint's first program was not called for this block. */
static __always_inline bool skipped(struct program_pair *pair, __u32 hook, __u64 key)
{
	if (pair->key == key)
		return false;
	/* It was, but an interrupt came after that, in which it was called again. */
	return hook >= HOOK_FREES || !bpf_map_lookup_elem(&blocks, &key);
}

/*
 * A tracepoint's two programs, of which the second is called after the first. A
 * program that an interrupt finds running is not called for what happens in that
 * interrupt, and a softirq may free thousands of objects; the second program then
 * does the work of the first. What is lost is what finds both running. The kernel
 * counts how often the second was not called. Where it alone was running that is
 * no loss, and is taken off as far as it can be known: what remains is an upper bound.
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

/* kmalloc, and on 5.10 kmalloc_node. */
static __always_inline int on_kmalloc(struct bpf_raw_tracepoint_args *ctx)
{
	return object_allocated(ctx, ctx->args[1], ctx->args[2], ctx->args[3], 0);
}
TRACED(kmalloc, HOOK_KMALLOC, ctx->args[1])

/* kmem_cache_alloc, and on 5.10 kmem_cache_alloc_node. */
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

/* An argument of percpu_alloc_percpu, counted without the call site that newer kernels have. */
static __always_inline __u64 percpu_argument(struct bpf_raw_tracepoint_args *ctx, int number)
{
	__u64 older = ctx->args[number], newer = ctx->args[number + 1];

	/* Else clang makes one load of it, at an address that the verifier cannot follow. */
	barrier_var(older);
	barrier_var(newer);
	return tells_percpu_bytes ? newer : older;
}

/* Where the first copy is. */
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

/* On mm_page_alloc while page_bias is learned. */
SEC("raw_tp")
int learn_page(struct bpf_raw_tracepoint_args *ctx)
{
	if ((__u32)ctx->args[1] == LEARN_ORDER && ids_of_current().pid == filter.own_pid)
		learned_page = ctx->args[0];
	return 0;
}

/* Global, so that the verifier follows it once and not again for each object. */
__noinline int free_one_of(__u64 objects, __u32 i)
{
	__u64 address = 0;

	bpf_probe_read_kernel(&address, sizeof(address), (void *)objects + i * sizeof(address));
	return block_remove(address);
}

/* kfree_rcu() collects a page of them. */
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
 * Kprobes, as fentry does not accept an array of pointers among the arguments
 * (5.10 and 6.1).
 */
SEC("kprobe/kmem_cache_free_bulk")
int bulk_free(struct pt_regs *ctx)
{
	return free_each_of(PT_REGS_PARM3(ctx), PT_REGS_PARM2(ctx));
}

/*
 * 6.18 and later: objects of some caches, of all in 7.x, that are given to
 * kfree_rcu() wait in a sheaf, and are told no more.
 */
SEC("kprobe/__kfree_rcu_sheaf")
int rcu_free(struct pt_regs *ctx)
{
	return block_remove(PT_REGS_PARM2(ctx));
}
