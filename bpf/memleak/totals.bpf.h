/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Sums by stack, with their values at the peak of the outstanding bytes.
 */
#ifndef MEMTOOLS_MEMLEAK_TOTALS_BPF_H
#define MEMTOOLS_MEMLEAK_TOTALS_BPF_H

#include "types.bpf.h"

static __always_inline __u32 execs_of_current(void)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task();

	return BPF_CORE_READ(task, self_exec_id);
}

static __always_inline struct total_key total_key_of(__u64 stack)
{
	return (struct total_key){
		.stack = stack,
		.pid = process_of_current(),
		.execs = execs_of_current(),
	};
}

/* Saves the values of a total at the last peak, before the total changes. */
static __always_inline void note_peak(struct total *total)
{
	if (!follow_peak || total->peak == peak.number)
		return;
	total->bytes_at_peak = total->bytes;
	total->count_at_peak = total->count;
	total->peak = peak.number;
}

/* Adds to the outstanding bytes, and notes a new peak. */
static __always_inline void outstanding_changes(__u64 bytes)
{
	if (!follow_peak)
		return;
	__sync_fetch_and_add(&peak.outstanding, bytes);
	if (peak.outstanding <= peak.bytes)
		return;
	peak.bytes = peak.outstanding;
	peak.time_ns = bpf_ktime_get_ns();
	peak.execs = execs_of_current();
	__sync_fetch_and_add(&peak.number, 1);
}

static __noinline int total_add(__u64 stack, __u64 bytes)
{
	struct total_key key = total_key_of(stack);
	struct total *total = value_of(&totals, &key, (const void *)&no_total);

	if (!total) {
		count_loss(entries);
		return 0;
	}
	note_peak(total);
	__sync_fetch_and_add(&total->bytes, bytes);
	__sync_fetch_and_add(&total->count, 1);
	outstanding_changes(bytes);
	return 0;
}

static __noinline int total_subtract(__u64 stack, __u64 bytes)
{
	struct total_key key = total_key_of(stack);
	struct total *total = bpf_map_lookup_elem(&totals, &key);

	if (total) {
		note_peak(total);
		__sync_fetch_and_add(&total->bytes, -bytes);
		__sync_fetch_and_add(&total->count, -1);
		outstanding_changes(-bytes);
	}
	return 0;
}

static __noinline int unknown_free_by(__u64 stack)
{
	struct total_key key = total_key_of(stack);
	__u64 zero = 0, *count = value_of(&unknown_frees, &key, &zero);

	if (!count) {
		count_loss(entries);
		return 0;
	}
	__sync_fetch_and_add(count, 1);
	return 0;
}

#endif /* MEMTOOLS_MEMLEAK_TOTALS_BPF_H */
