/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Counts by key, in a pair of maps. While programs count in one of them, user space reads and
 * empties the other (src/bpf/map_counts.rs), so that keys that no longer occur do not fill a map
 * for long. Emptying the map that programs count in would lose what is added between the reading of
 * an entry and its removal.
 *
 * A map of maps, `name`, holds the map that programs count in. While `name` is empty, they count in
 * `name`_a. The kernel returns from an update of `name` when no program that has seen the old map
 * is running any more (4.20, 1ae80cf31938): that takes 10 to 30 ms, which a start need not wait
 * for.
 */
#ifndef MEMTOOLS_COUNT_BPF_H
#define MEMTOOLS_COUNT_BPF_H

#include "memtools.bpf.h"

#define COUNT_KEYS 16384

/*
 * Defines the maps: `name` holds `name`_a or `name`_b, which map keys of `key_type` to values of
 * `value_type`.
 */
#define COUNTS(name, key_type, value_type, entries)                                                \
	COUNT_MAPS(name, entries, __type(key, key_type); __type(value, value_type))

/*
 * Defines the maps as COUNTS does, but by the sizes of keys and values alone: such maps can be
 * replaced by larger ones.
 */
#define COUNTS_OF_SIZES(name, key_bytes, value_bytes, entries)                                     \
	COUNT_MAPS(name, entries, __uint(key_size, key_bytes); __uint(value_size, value_bytes))

/* Defines the maps of COUNTS and COUNTS_OF_SIZES, by the members that describe keys and values. */
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
 * Returns the value of the key in COUNTS(name). A new key is added with a copy of `zero`; NULL if
 * the map is full, which is counted as a loss.
 */
#define count_of(name, key, zero) count_in(&name, &name##_a, key, zero)

/* Adds to the value of the key in COUNTS(name), whose values are __u64. */
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
