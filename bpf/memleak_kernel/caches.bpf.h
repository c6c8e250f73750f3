/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Slab caches: the cache that an object is in, and whether the options ask for that cache.
 */
#ifndef MEMTOOLS_MEMLEAK_KERNEL_CACHES_BPF_H
#define MEMTOOLS_MEMLEAK_KERNEL_CACHES_BPF_H

#include "pages.bpf.h"

/* Returns the head of the pages that this page was allocated with: they are one slab. */
static __noinline __u64 head_of(__u64 page)
{
	__u64 info;

	if (bpf_core_field_exists(struct page___info, compound_info)) {
		info = BPF_CORE_READ((struct page___info *)page, compound_info);
		/*
		 * Where the size of struct page allows it, `info` is a mask of the address's upper
		 * bits.
		 */
		if (info & 1 && (__s64)info > -(1LL << 32))
			return page & info;
	} else {
		info = BPF_CORE_READ((struct page *)page, compound_head);
	}
	return info & 1 ? info - 1 : page;
}

/* Returns the slab cache of an object, or an enum kind. */
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

/* Whether the options ask for objects of this cache. Notes the cache's name. */
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

/* Learns page_bias from the address of the tool's own pages, which learn_page() has seen. */
static __noinline int learn(__u64 address)
{
	__u64 bias = learned_page - (address >> page_shift) * STRUCT_PAGE_BYTES;

	/* The bias is wrong if an interrupt allocated as many pages in between. */
	if (learned_page && bias % BIAS_ALIGNMENT == 0 && ids_of_current().pid == filter.own_pid)
		page_bias = bias;
	return 0;
}

#endif /* MEMTOOLS_MEMLEAK_KERNEL_CACHES_BPF_H */
