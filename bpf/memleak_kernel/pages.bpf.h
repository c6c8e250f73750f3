/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Blocks of whole pages: the pages that an address is in, and blocks that were freed in part.
 */
#ifndef MEMTOOLS_MEMLEAK_KERNEL_PAGES_BPF_H
#define MEMTOOLS_MEMLEAK_KERNEL_PAGES_BPF_H

#include "blocks.bpf.h"

static __always_inline __u64 page_of(__u64 address)
{
	return page_bias + (address >> page_shift) * STRUCT_PAGE_BYTES;
}

/* Whether any block has 2^order pages. */
static __always_inline bool pages_live(__u32 order)
{
	/*
	 * Without the barrier clang adds `order` to the address where only clang, not the verifier,
	 * knows its bound.
	 */
	barrier_var(order);
	return order < PAGE_ORDERS && live_pages[order];
}

/*
 * Removes the block of 2^order pages that contains this page. Returns 0 if there is none.
 *
 * This and the functions on pages below are global, so that the verifier follows each once and not
 * again for each order, which would take minutes on 5.10 and 6.1.
 */
__noinline int pages_remove(__u64 page, __u32 order)
{
	__u64 key = page_key(page, order);

	if (!pages_live(order) || !block_remove(key))
		return 0;
	pages_removed(key, order);
	return 1;
}

/*
 * Removes the block of pages that the slab allocator has taken: they count as the objects in them.
 */
static __noinline int pages_become_objects(__u64 address)
{
	__u64 page = page_of(address);

	for (__u32 order = 0; order < PAGE_ORDERS; order++)
		if (pages_remove(page, order))
			break;
	return 0;
}

/*
 * Marks those of 64 pages of the block that `bits` names as freed. Returns 0 if one of them was
 * marked before.
 */
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

/* Marks 64 pages of the block as freed, if they are among `pages` pages from `first` on. */
__noinline int parts_mark_within(__u64 key, __u32 word, __u32 first, __u32 pages)
{
	return word * 64 >= first && word * 64 < first + pages ? parts_mark(key, word, ~0ULL) : 0;
}

/* Marks `pages` pages from `first` on as freed. Returns 0 if they were marked before. */
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
 * Frees 2^freed pages from this one on, of a block of 2^order pages. Returns 0 if there is no such
 * block.
 */
__noinline int pages_shrink(__u64 page, __u32 order, __u32 freed)
{
	__u64 key = page_key(page, order), bytes = 1ULL << (page_shift + freed % PAGE_ORDERS);
	struct block *block;

	if (!pages_live(order))
		return 0;
	block = block_find(key);
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

#endif /* MEMTOOLS_MEMLEAK_KERNEL_PAGES_BPF_H */
