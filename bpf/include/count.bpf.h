/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Counts by key, in two maps: while one is counted in, user space reads the other
 * and empties it (src/bpf/map_counts.rs), so that what has gone takes no room for long.
 * To empty the one that is counted in would lose what is added between the
 * reading of an entry and its removal.
 *
 * Which of the two it is says the map that holds it; at first, when that is empty,
 * it is `name`_a. The kernel returns from an update of such a map when no program is
 * left that has seen the old one (4.20, 1ae80cf31938): that takes 10 to 30 ms, which
 * a start need not wait for.
 */
#ifndef MEMTOOLS_COUNT_BPF_H
#define MEMTOOLS_COUNT_BPF_H

#include "memtools.bpf.h"

#define COUNT_KEYS 16384

/* The maps: `name` holds `name`_a or `name`_b, which have values of `value_type` by `key_type`. */
#define COUNTS(name, key_type, value_type, entries)                                                \
	COUNT_MAPS(name, entries, __type(key, key_type); __type(value, value_type))

/* COUNTS by the sizes of keys and values alone: such maps can be replaced by larger ones. */
#define COUNTS_OF_SIZES(name, key_bytes, value_bytes, entries)                                     \
	COUNT_MAPS(name, entries, __uint(key_size, key_bytes); __uint(value_size, value_bytes))

/* The maps of either, by the members that describe their keys and values. */
#define COUNT_MAPS(name, entries, key_and_value)                                                   \
	struct name##_hash {                                                                       \
		__uint(type, BPF_MAP_TYPE_HASH);                                                   \
		__uint(max_entries, entries);                                                      \
		key_and_value;                                                                     \
	} name##_a SEC(".maps"), name##_b SEC(".maps");                                            \
	struct {                                                                                   \
		__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);                                          \
		__uint(max_entries, 1);                                                            \
		__type(key, __u32);                                                                \
		__array(values, struct name##_hash);                                               \
	} name SEC(".maps")

/*
 * The key's value in COUNTS(name), at first a copy of `zero`; NULL, which is counted,
 * if there is no room for it.
 */
#define count_of(name, key, zero) count_in(&name, &name##_a, key, zero)

/* Add to the key's count in COUNTS(name), where that is a __u64. */
#define count_add(name, key, add) count_add_in(&name, &name##_a, key, add)

static __always_inline void *count_in(void *holder, void *first_map, const void *key,
				      const void *zero)
{
	void *count, *map;
	__u32 first = 0;

	map = bpf_map_lookup_elem(holder, &first);
	count = value_of(map ? map : first_map, key, zero);
	if (!count)
		count_loss(entries);
	return count;
}

static __always_inline void count_add_in(void *holder, void *first_map, const void *key, __u64 add)
{
	__u64 zero = 0;
	__u64 *count = count_in(holder, first_map, key, &zero);

	if (count)
		__sync_fetch_and_add(count, add);
}

#endif /* MEMTOOLS_COUNT_BPF_H */
