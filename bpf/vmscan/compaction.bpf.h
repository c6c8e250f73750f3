/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Compaction of one zone of memory, and the state of the zone.
 */
#ifndef MEMTOOLS_VMSCAN_COMPACTION_BPF_H
#define MEMTOOLS_VMSCAN_COMPACTION_BPF_H

#include "totals.bpf.h"

/* Fragmentation index that this kernel does not report. */
enum fragmentation {
	FRAGMENTATION_UNKNOWN = 0x7fffffff,
};
EXPORT_TYPE(enum fragmentation);

/* Event of --trace-compaction: a compaction of one zone of memory. */
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
	__s32 order; /* of the pages that are wanted; -1: as large as possible */
	__s32 node;
	__s32 fragmentation; /* the zone's index for this order, in thousandths */
	enum compact_result status;
	__u32 sync; /* 1: waits for pages that are being written, and for locks */
	__u32 reserved;
	char comm[COMM_BYTES];
	char zone[16];
};
EXPORT_TYPE(struct compaction);

const volatile struct compaction no_compaction = {
	.min_pages = UNKNOWN,
	.low_pages = UNKNOWN,
	.high_pages = UNKNOWN,
	.free_pages = UNKNOWN,
	.fragmentation = FRAGMENTATION_UNKNOWN,
};

BY_THREAD(compacting, struct compaction);

/* Limit of the sizes of free blocks that a zone has lists for: 11, or 14 with pages of 64 KiB. */
#define MAX_ORDERS 32

/*
 * Returns the zone's fragmentation index for an order, in thousandths, as fragmentation_index() of
 * mm/vmstat.c does: near 0 an allocation fails for lack of memory, near 1000 for fragmentation.
 * -1000: there is a free block for it.
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
		return UNKNOWN;
	bpf_core_read(&pages, sizeof(pages), &zone->_watermark[which & 3]);
	/*
	 * The boost raises all watermarks for a while after pages of different mobility were mixed.
	 */
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
	/*
	 * The counter can be negative while CPUs have changes that they have not yet added to it.
	 */
	compaction->free_pages = pages > 0 ? pages : 0;
	if (bpf_core_field_exists(zone->free_area))
		compaction->fragmentation = fragmentation_index(zone, compaction->order);
	return 0;
}

#endif /* MEMTOOLS_VMSCAN_COMPACTION_BPF_H */
