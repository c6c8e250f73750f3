/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Fill levels of the tables that user space empties, or replaces by larger ones, while programs add
 * to them (src/bpf/fill_level.rs). Such a table starts small. When it is filled to a threshold,
 * user space is asked once to make space; entries that are added meanwhile use the rest of the
 * table.
 */
#ifndef MEMTOOLS_ROOM_BPF_H
#define MEMTOOLS_ROOM_BPF_H

#include "memtools.bpf.h"

enum room_of {
	ROOM_STACKS,
	ROOM_COUNTS,
	ROOMS,
};

struct room {
	__u64 taken;  /* entries added since user space last set this to 0 */
	__u64 enough; /* value of `taken` at which user space is asked; 0: never */
	__u64 asked;  /* 1 from the request until user space sets this to 0 */
};

/* Fill level of each table, by enum room_of. User space reads and writes the levels at any time. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, ROOMS);
	__type(key, __u32);
	__type(value, struct room);
} rooms SEC(".maps");

/* Requests to user space to make space, each an enum room_of. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
} room_requests SEC(".maps");

/* Counts an added entry, and sends the request for space at the threshold. */
static __noinline int room_take(__u32 which)
{
	struct room *room = bpf_map_lookup_elem(&rooms, &which);

	if (!room)
		return 0;
	__sync_fetch_and_add(&room->taken, 1);
	if (!room->enough || room->taken < room->enough || room->asked)
		return 0;
	room->asked = 1;
	bpf_ringbuf_output(&room_requests, &which, sizeof(which), 0);
	return 0;
}

#endif /* MEMTOOLS_ROOM_BPF_H */
