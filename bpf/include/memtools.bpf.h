/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Header that every BPF program of the suite includes first: kernel types, libbpf's helpers, and
 * the counters of losses.
 */
#ifndef MEMTOOLS_BPF_H
#define MEMTOOLS_BPF_H

#if !__has_include("arch_registers.bpf.h") || !__has_include("vmlinux.h")
#error "this architecture lacks code: CONTRIBUTING.md, Add an architecture"
#endif

#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>

/*
 * Exports a type to user space: libbpf-cargo generates Rust types only for the types of the
 * object's variables and maps.
 */
#define EXPORT_TYPE(type)		EXPORT_TYPE_AS(type, __COUNTER__)
#define EXPORT_TYPE_AS(type, number)	EXPORT_TYPE_NAMED(type, number)
#define EXPORT_TYPE_NAMED(type, number) type *exported_type_##number __attribute__((unused))

/*
 * Value of a number that this kernel does not report. A macro rather than an enumerator, as the
 * enums of clang 14 have 32 bits; src/bpf/types.rs defines the same value.
 */
#define UNKNOWN (~0ULL)

/*
 * `for` of a loop that calls functions, which clang must not unroll. In an unrolled loop, the
 * verifier looks once more, for each iteration, at all functions that are called, to find the depth
 * of the stack: millions of instructions for nested rounds.
 */
#define CALL_LOOP _Pragma("clang loop unroll(disable)") for

/* Capacity of a map with an entry for each thread that is in a call. */
#define THREADS 8192

/*
 * Defines a map of the call that each thread is in the middle of, by pid_tgid as
 * bpf_get_current_pid_tgid() returns it. The memory of the map is allocated when the map is
 * created.
 */
#define BY_THREAD(name_, type_)                                                                    \
	struct {                                                                                   \
		__uint(type, BPF_MAP_TYPE_HASH);                                                   \
		__uint(max_entries, THREADS);                                                      \
		__type(key, __u64);                                                                \
		__type(value, type_);                                                              \
	} name_ SEC(".maps")

/*
 * Counters of losses. Nothing is lost silently: each failure to record something adds one to the
 * counter of its reason, which user space reads and reports (src/run/losses.rs). The map is an
 * array with atomic adds rather than a per-CPU array: losses are rare, and a task may be preempted
 * in the middle of a uprobe's program, which makes a plain add to a per-CPU counter inexact.
 */
struct losses {
	__u64 events;	   /* ring buffer full */
	__u64 entries;	   /* a map of live objects or totals full */
	__u64 calls;	   /* calls not followed: map full, or return not seen */
	__u64 stacks;	   /* distinct stacks not stored: table full */
	__u64 busy_stacks; /* stacks not taken: no slot for one more at the same time */
	__u64 deep_stacks; /* stacks cut at the depth limit */
	__u64 lookups;	   /* mappings, of page faults or segments, that could not be looked up */
	__u64 processes;   /* processes not followed: map full */
	__u64 own_events;  /* not a loss: the tool's own events that match the options */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct losses);
} losses SEC(".maps");

#define count_losses(reason, count)                                                                \
	({                                                                                         \
		__u32 _first = 0;                                                                  \
		struct losses *_losses = bpf_map_lookup_elem(&losses, &_first);                    \
                                                                                                   \
		if (_losses)                                                                       \
			__sync_fetch_and_add(&_losses->reason, (count));                           \
	})
#define count_loss(reason) count_losses(reason, 1)

/*
 * Whether any of the programs is on a kretprobe. src/run/skeleton.rs sets this before load. The
 * kernel misses returns if too many threads are in a function, without a report. The runs of other
 * programs that the kernel skips are counted by the kernel.
 */
const volatile __u8 with_kretprobes;

/*
 * Records a call that this thread begins, in a BY_THREAD map. With kretprobes, an entry that the
 * map still has for the thread counts as lost: the return of that call was not seen. Without them,
 * programs are detached all at once, and calls that begin meanwhile may not be seen to return.
 */
static __always_inline void begin_call(void *calls, __u64 thread, const void *call)
{
	if (with_kretprobes && bpf_map_lookup_elem(calls, &thread))
		count_loss(calls);
	if (bpf_map_update_elem(calls, &thread, call, BPF_ANY))
		count_loss(calls);
}

/*
 * Removes the call of an ending thread whose return was not seen from a BY_THREAD map, so that the
 * next thread with its id does not inherit the call. Calls are counted as lost as in begin_call().
 */
static __always_inline void lose_call(void *calls)
{
	__u64 thread = bpf_get_current_pid_tgid();

	if (!bpf_map_delete_elem(calls, &thread) && with_kretprobes)
		count_loss(calls);
}

/*
 * Returns the value of the key. A new key is added with a copy of `zero`; NULL if the map is full.
 */
static __always_inline void *value_of(void *map, const void *key, const void *zero)
{
	void *value = bpf_map_lookup_elem(map, key);

	if (value)
		return value;
	bpf_map_update_elem(map, key, zero, BPF_NOEXIST);
	return bpf_map_lookup_elem(map, key);
}

#endif /* MEMTOOLS_BPF_H */
