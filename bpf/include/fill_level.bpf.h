/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Fill levels of the tables that user space empties, or replaces by larger ones, while programs add
 * to them (src/bpf/fill_level.rs). Such a table starts small. When it is filled to a threshold,
 * user space is asked once to make space; entries that are added meanwhile use the rest of the
 * table.
 */
#ifndef MEMTOOLS_FILL_LEVEL_BPF_H
#define MEMTOOLS_FILL_LEVEL_BPF_H

#include "memtools.bpf.h"

enum table_id {
	TABLE_STACKS,
	TABLE_COUNTS,
	TABLES,
};

struct fill_level {
	__u64 used;	    /* entries added since user space last set this */
	__u64 threshold;    /* value of `used` at which user space is asked; 0: never */
	__u64 is_requested; /* 1 from the request until user space sets this to 0 */
};

/* Fill levels of the tables, by enum table_id. User space reads and writes them at any time. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, TABLES);
	__type(key, __u32);
	__type(value, struct fill_level);
} fill_levels SEC(".maps");

/* Requests to user space for a larger or empty table, each an enum table_id. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} table_requests SEC(".maps");

/* Counts an added entry, and sends the request for space at the threshold. */
static __noinline int count_table_entry(__u32 table)
{
	struct fill_level *level = bpf_map_lookup_elem(&fill_levels, &table);

	if (!level)
		return 0;
	__sync_fetch_and_add(&level->used, 1);
	if (!level->threshold || level->used < level->threshold || level->is_requested)
		return 0;
	level->is_requested = 1;
	bpf_ringbuf_output(&table_requests, &table, sizeof(table), 0);
	return 0;
}

#endif /* MEMTOOLS_FILL_LEVEL_BPF_H */
