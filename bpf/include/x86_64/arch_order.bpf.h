/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Order in which other CPUs see accesses to memory, for memory that one CPU hands over to another.
 *
 * x86-64 reorders nothing that matters here: loads are done in their order, stores become visible
 * in their order and after all earlier loads, and an instruction with a lock prefix keeps every
 * access before it apart from every access after it. Only the compiler has to be kept from
 * reordering.
 *
 * arm64 reorders all of these, so its functions need more than the same instructions: an atomic
 * addition whose result is not used is `stadd` there, which orders nothing, while an exchange, or
 * an addition whose result is used, orders what is before and behind it.
 */
#ifndef MEMTOOLS_ARCH_ORDER_BPF_H
#define MEMTOOLS_ARCH_ORDER_BPF_H

#include "memtools.bpf.h"

/*
 * Stores a word that hands memory over: whoever sees the word sees all earlier stores, and all
 * earlier loads are done.
 */
static __always_inline void order_store(__u64 *word, __u64 value)
{
	barrier();
	*(volatile __u64 *)word = value;
}

/*
 * Adds to a word that hands memory over: accesses before it, in the order of the program, are not
 * seen behind it, and accesses behind it not before it. It is `lock add`.
 */
static __always_inline void order_add(__u64 *word, __u64 value)
{
	__sync_fetch_and_add(word, value);
}

#endif /* MEMTOOLS_ARCH_ORDER_BPF_H */
