/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * memleak's live blocks, by process and address.
 *
 * Live blocks are in maps of two kinds. `table` is an array that user space maps and reads as one
 * plain copy: at a million blocks that takes milliseconds, where walking a hash map by its keys
 * takes seconds. The table costs 50 bytes a block. Each block has two buckets where it can be; if
 * both are full, it goes to a hash map, at about 110 bytes a block. The buckets of a hash map are
 * all made when it is created, so user space adds larger maps as they are needed: `overflow` is the
 * first, and `more_overflow` has the next ones in their order. New blocks go to the last map that
 * has space.
 *
 * A slot of the table is claimed with a compare-and-exchange. Kernels before 5.12 have none in BPF,
 * and refuse a program that contains one, even where it is never run. So a constant argument says
 * to each function here whether its program uses the table; without the table, all blocks are in
 * the overflow maps.
 */
#ifndef MEMTOOLS_LIVE_BPF_H
#define MEMTOOLS_LIVE_BPF_H

#include "arch_order.bpf.h"
#include "process.bpf.h"

/*
 * Slot of the table. User addresses have their upper bits clear. Other values of `address` mark a
 * slot without a live block: 0, never used; SLOT_CLAIMED, being written; SLOT_FREED with an
 * address, a block that was freed.
 */
struct block {
	__u64 address;
	__u64 stack; /* id in `stacks` */
	__u64 born;  /* see BORN_TIME_BITS */
	__u64 owner; /* bytes requested << BLOCK_PID_BITS | process */
};

/* Layout of the words of a slot, and sizes of the maps. */
enum live_layout {
	BLOCK_PID_BITS = 22, /* PID_MAX_LIMIT is 1 << 22 */
	/*
	 * CLOCK_MONOTONIC at allocation, 18 years of it; above it the sampling level at allocation.
	 */
	BORN_TIME_BITS = 59,
	BUCKET_BLOCKS = 8,
	MORE_OVERFLOW = 2,
};
EXPORT_TYPE(enum live_layout);

#define SLOT_CLAIMED (1ULL << 63)
#define SLOT_FREED   (1ULL << 62)
/*
 * Largest size that fits into `owner`; larger blocks, such as an overcommitted calloc, go to
 * `overflow`.
 */
#define BLOCK_MAX_SIZE ((1ULL << (64 - BLOCK_PID_BITS)) - 1)
#define BORN_TIME      ((1ULL << BORN_TIME_BITS) - 1)

struct block_bucket {
	__u64 was_full; /* 1: a block of this bucket may be in its second one, or in overflow */
	struct block blocks[BUCKET_BLOCKS];
};

struct live_key {
	__u64 address;
	__u64 pid;
};

struct live_block {
	__u64 size; /* bytes requested */
	__u64 stack;
	__u64 born;
};

const volatile __u32 bucket_count = 1;

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct block_bucket);
} table SEC(".maps");

/*
 * First of the overflow maps. Sizes of keys and values alone: 6.1 does not take a map that is made
 * later, without types, instead of one with types.
 */
struct overflow {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1);
	__uint(key_size, sizeof(struct live_key));
	__uint(value_size, sizeof(struct live_block));
} overflow SEC(".maps");
EXPORT_TYPE(struct live_key);
EXPORT_TYPE(struct live_block);

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, MORE_OVERFLOW);
	__type(key, __u32);
	__array(values, struct overflow);
} more_overflow SEC(".maps");

/* Blocks that were put into the overflow maps, less those that were taken out again. */
__u64 overflow_blocks;
/*
 * Number of blocks at which user space is requested the next map, once; from then on it checks by
 * itself.
 */
const volatile __u64 overflow_threshold = ~0ULL;
__u8 requested_overflow;

/* Asks user space for the next overflow map. */
static int request_overflow(void);

static __always_inline struct block_bucket *bucket_of(__u64 address, __u64 pid, __u32 choice)
{
	__u64 hash = (address ^ pid << 48) * 0x9e3779b97f4a7c15ULL;
	__u32 index;

	/* One multiplication would crowd addresses at regular distances together. */
	hash = (hash ^ hash >> 32) * 0xbf58476d1ce4e5b9ULL;
	index = (choice ? (__u32)hash : hash >> 32) * bucket_count >> 32;
	return bpf_map_lookup_elem(&table, &index);
}

/*
 * Puts a block into a bucket. Returns 0 if the bucket is full.
 *
 * The other words of a slot are stored between two changes of its address: the claim, a
 * compare-and-exchange, which keeps the order on every architecture, and the store of the new
 * address. So whoever reads an address, then the other words, and then the same address again has
 * the words that belong to the address.
 *
 * This function and bucket_take() are global, so that the verifier follows them once and not for
 * each call, which took 7 ms of the start.
 */
__noinline int bucket_put(struct block_bucket *bucket, __u64 address, __u64 owner, __u64 stack,
			  __u64 born)
{
	if (!bucket)
		return 0;
	for (int i = 0; i < BUCKET_BLOCKS; i++) {
		struct block *block = &bucket->blocks[i];
		__u64 was = block->address;

		if (was && !(was & SLOT_FREED))
			continue;
		if (__sync_val_compare_and_swap(&block->address, was, SLOT_CLAIMED) != was)
			continue;
		block->stack = stack;
		block->born = born;
		block->owner = owner;
		order_store(&block->address, address);
		return 1;
	}
	bucket->was_full = 1;
	return 0;
}

/*
 * Takes a block out of a bucket into `taken`. Returns 0 if the block is not there. If it was freed
 * already, and not allocated since, taken->born is then set to the time of its allocation.
 *
 * clang does not unroll a loop with the barriers of order_store() unless requested.
 */
__noinline int bucket_take(struct block_bucket *bucket, __u64 address, __u64 pid,
			   struct live_block *taken)
{
	if (!bucket || !taken)
		return 0;
#pragma unroll
	for (int i = 0; i < BUCKET_BLOCKS; i++) {
		struct block *block = &bucket->blocks[i];
		__u64 owner = block->owner;

		if ((block->address & ~SLOT_FREED) != address ||
		    (owner & ((1 << BLOCK_PID_BITS) - 1)) != pid)
			continue;
		if (__sync_val_compare_and_swap(&block->address, address, SLOT_CLAIMED) !=
		    address) {
			taken->born = block->born;
			continue;
		}
		/* Before the claim, the slot could become another process's at the same address. */
		if (block->owner != owner) {
			order_store(&block->address, address);
			continue;
		}
		taken->size = owner >> BLOCK_PID_BITS;
		taken->stack = block->stack;
		taken->born = block->born;
		/* From here on others may store another block: the words above have been read. */
		order_store(&block->address, address | SLOT_FREED);
		return 1;
	}
	return 0;
}

static __noinline int overflow_put(__u32 pid, __u64 address, __u64 size, __u64 stack, __u64 born)
{
	struct live_key key = { .address = address, .pid = pid };
	struct live_block block = { .size = size, .stack = stack, .born = born };
	long error = -1;

	for (int i = MORE_OVERFLOW - 1; i >= 0 && error; i--) {
		__u32 number = i;
		void *map = bpf_map_lookup_elem(&more_overflow, &number);

		if (map)
			error = bpf_map_update_elem(map, &key, &block, BPF_ANY);
	}
	if (error && bpf_map_update_elem(&overflow, &key, &block, BPF_ANY)) {
		count_loss(entries);
		return 0;
	}
	__sync_fetch_and_add(&overflow_blocks, 1);
	if (overflow_blocks >= overflow_threshold && !requested_overflow) {
		requested_overflow = 1;
		request_overflow();
	}
	return 1;
}

/* Takes a block out of an overflow map into `taken`. Returns 0 if the block is not there. */
static __always_inline int take_from(void *map, const struct live_key *key,
				     struct live_block *taken)
{
	struct live_block *block = bpf_map_lookup_elem(map, key);

	if (!block)
		return 0;
	*taken = *block;
	if (bpf_map_delete_elem(map, key))
		return 0;
	__sync_fetch_and_add(&overflow_blocks, -1);
	return 1;
}

static __noinline int overflow_take(__u32 pid, __u64 address, struct live_block *taken)
{
	struct live_key key = { .address = address, .pid = pid };

	if (take_from(&overflow, &key, taken))
		return 1;
	for (__u32 i = 0; i < MORE_OVERFLOW; i++) {
		__u32 number = i;
		void *map = bpf_map_lookup_elem(&more_overflow, &number);

		if (!map)
			break;
		if (take_from(map, &key, taken))
			return 1;
	}
	return 0;
}

static __noinline int table_put(__u64 pid, __u64 address, __u64 size, __u64 stack, __u64 born)
{
	struct block_bucket *bucket;

	if (size > BLOCK_MAX_SIZE)
		return 0;
	for (__u32 choice = 0; choice < 2; choice++) {
		bucket = bucket_of(address, pid, choice);
		if (bucket_put(bucket, address, size << BLOCK_PID_BITS | pid, stack, born))
			return 1;
	}
	return 0;
}

static __noinline int table_take(__u64 pid, __u64 address, struct live_block *taken)
{
	for (__u32 choice = 0; choice < 2; choice++) {
		struct block_bucket *bucket = bucket_of(address, pid, choice);

		if (bucket_take(bucket, address, pid, taken))
			return 1;
		if (!bucket || !bucket->was_full)
			break;
	}
	return 0;
}

/*
 * Returns the process number at `pid`; NULL: the current process. The number is read where it is
 * needed: the programs on probes have no stack to keep it.
 */
static __always_inline __u32 live_process(const volatile __u32 *pid)
{
	return pid ? *pid : process_of_current();
}

/* Adds a block that was not live before. Returns 0 if it is lost. */
static __always_inline int live_put(const volatile __u32 *pid, __u64 address, __u64 size,
				    __u64 stack, __u64 born, bool use_table)
{
	return (use_table && table_put(live_process(pid), address, size, stack, born)) ||
	       overflow_put(live_process(pid), address, size, stack, born);
}

/*
 * Removes a block from the live ones, into `taken`. Returns 0 if it is not live. If taken->born
 * changes then, the block was freed before, and taken->born is the time of its allocation.
 */
static __always_inline int live_take(const volatile __u32 *pid, __u64 address,
				     struct live_block *taken, bool use_table)
{
	if (use_table && table_take(live_process(pid), address, taken))
		return 1;
	return (!use_table || overflow_blocks) && overflow_take(live_process(pid), address, taken);
}

#endif /* MEMTOOLS_LIVE_BPF_H */
