/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Counts by key, which only grow: src/counts.rs reads them and takes the
 * difference. Emptying the map at each interval would lose what is counted
 * between the reading of an entry and its removal.
 */
#ifndef MEMTOOLS_COUNT_BPF_H
#define MEMTOOLS_COUNT_BPF_H

#include "memtools.bpf.h"

#define COUNT_KEYS 16384

/* Add to the key's count in a hash of __u64. */
static __always_inline void count_add(void *map, const void *key, __u64 add)
{
	__u64 zero = 0;
	__u64 *count = bpf_map_lookup_elem(map, key);

	if (!count) {
		bpf_map_update_elem(map, key, &zero, BPF_NOEXIST);
		count = bpf_map_lookup_elem(map, key);
		if (!count) {
			count_loss(entries);
			return;
		}
	}
	__sync_fetch_and_add(count, add);
}

#endif /* MEMTOOLS_COUNT_BPF_H */
