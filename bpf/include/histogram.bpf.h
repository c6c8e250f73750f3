/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Histograms by powers of two, as bpftrace's hist() has them; src/print/histogram.rs
 * prints them.
 */
#ifndef MEMTOOLS_HISTOGRAM_BPF_H
#define MEMTOOLS_HISTOGRAM_BPF_H

#include "memtools.bpf.h"

/* Slot 0 counts zeros, slot n the values of n bits: [2^(n-1), 2^n). */
#define HISTOGRAM_SLOTS 65

struct histogram {
	__u64 slots[HISTOGRAM_SLOTS];
};

/* Returns the slot of a value: the number of its bits. */
static __always_inline __u32 histogram_slot(__u64 value)
{
	__u32 slot = 0;

	/* BPF has no instruction that counts bits: search for the highest one by halves. */
	if (value >> 32) {
		value >>= 32;
		slot += 32;
	}
	if (value >> 16) {
		value >>= 16;
		slot += 16;
	}
	if (value >> 8) {
		value >>= 8;
		slot += 8;
	}
	if (value >> 4) {
		value >>= 4;
		slot += 4;
	}
	if (value >> 2) {
		value >>= 2;
		slot += 2;
	}
	if (value >> 1) {
		value >>= 1;
		slot += 1;
	}
	return slot + value;
}

/* Counts one value. `histogram` is in a map (or a global), which all CPUs share. */
static __always_inline void histogram_add(struct histogram *histogram, __u64 value)
{
	__u32 slot = histogram_slot(value);

	/* clang knows that `slot` is less than HISTOGRAM_SLOTS; the verifier does not. */
	barrier_var(slot);
	if (slot < HISTOGRAM_SLOTS)
		__sync_fetch_and_add(&histogram->slots[slot], 1);
}

#endif /* MEMTOOLS_HISTOGRAM_BPF_H */
