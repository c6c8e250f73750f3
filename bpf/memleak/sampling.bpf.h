/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Sampling: which allocations are recorded, and what the programs cost, by which user space raises
 * the sampling level.
 */
#ifndef MEMTOOLS_MEMLEAK_SAMPLING_BPF_H
#define MEMTOOLS_MEMLEAK_SAMPLING_BPF_H

#include "types.bpf.h"

static __always_inline struct hits *hits_of_cpu(void)
{
	return &hits[bpf_get_smp_processor_id() % HIT_SHARDS];
}

static __always_inline void count_hit(void)
{
	__sync_fetch_and_add(&hits_of_cpu()->count, 1);
}

/*
 * Clock of timed runs: the time, and below it the number of times that the task has lost the CPU.
 * The kernel's own statistics also count the time in which a program is preempted: on a busy
 * machine 862 % of the CPU time that the target had. Both are in one number, to spare the programs'
 * stacks (tests/e2e/load.rs).
 */
#define SWITCHES_BITS 16

static __always_inline __u64 timing_now(void)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task();
	__u16 switches = BPF_CORE_READ(task, nivcsw);

	return bpf_ktime_get_ns() << SWITCHES_BITS | switches;
}

/* Begins a run. Returns the clock of a timed run; 0 if this run is not timed. */
static __noinline __u64 timing_start(void)
{
	__u32 key = STEERING_MEASURES;
	__u64 *measures = bpf_map_lookup_elem(&steering, &key);

	return measures && *measures ? timing_now() : 0;
}

/* Adds up a timed run that began at `start`, unless it has lost the CPU. */
static __noinline int timing_add(__u64 start)
{
	__u64 now = timing_now(), ns = (now - start) >> SWITCHES_BITS;

	if (ns > LONGEST_RUN_NS || (__u16)now != (__u16)start)
		return 0;
	__sync_fetch_and_add(&hits_of_cpu()->measured, 1);
	__sync_fetch_and_add(&hits_of_cpu()->measured_ns, ns);
	return 0;
}

/* Ends a run. */
static __always_inline void timing_end(__u64 start)
{
	if (start)
		timing_add(start);
}

/* Returns the sampling level that user space has set. */
static __noinline __u32 current_level(void)
{
	__u32 key = STEERING_LEVEL;
	__u64 *level;

	if (!level_bytes)
		return 0;
	level = bpf_map_lookup_elem(&steering, &key);
	return level ? *level % MAX_LEVELS : 0;
}

/* Returns the mean distance between records, in bytes; tools/memleak/sampling.rs has the same. */
static __always_inline __u64 distance(__u32 level)
{
	return level ? (__u64)level_bytes << level : sample_bytes;
}

static __noinline bool wanted(__u64 size, __u32 level)
{
	__u64 bytes = distance(level);

	if (size < min_size || size > max_size)
		return false;
	/*
	 * The probability is in proportion to the size; tools/memleak/sampling.rs relies on that.
	 */
	if (size < bytes)
		return bpf_get_prandom_u32() < (size << 32) / bytes;
	return sample_rate <= 1 || bpf_get_prandom_u32() % sample_rate == 0;
}

#endif /* MEMTOOLS_MEMLEAK_SAMPLING_BPF_H */
