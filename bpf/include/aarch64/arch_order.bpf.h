/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Order in which other CPUs see accesses to memory, for memory that one CPU hands over to another.
 *
 * arm64 reorders loads and stores in any way, and an atomic addition whose result is not used is
 * `stadd`, which orders nothing. An exchange, and an addition whose result is used, are `swpal` and
 * `ldaddal`: they acquire and release. Kernels compile both since 5.18.
 */
#ifndef MEMTOOLS_ARCH_ORDER_BPF_H
#define MEMTOOLS_ARCH_ORDER_BPF_H

#include "memtools.bpf.h"

/*
 * Stores a word that hands memory over: whoever sees the word sees all earlier stores, and all
 * earlier loads are done. It is an exchange.
 */
static __always_inline void order_store(__u64 *word, __u64 value)
{
	barrier();
	__u64 old = __sync_lock_test_and_set(word, value);

	barrier_var(old);
}

/*
 * Adds to a word that hands memory over: accesses before it, in the order of the program, are not
 * seen behind it, and accesses behind it not before it. The barrier makes the compiler believe that
 * the result is used.
 */
static __always_inline void order_add(__u64 *word, __u64 value)
{
	__u64 old = __sync_fetch_and_add(word, value);

	barrier_var(old);
	barrier();
}

#endif /* MEMTOOLS_ARCH_ORDER_BPF_H */
