/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Pages of arm64, and the code that the kernel maps into each process (vdso).
 */
#ifndef MEMTOOLS_ARCH_MEMORY_BPF_H
#define MEMTOOLS_ARCH_MEMORY_BPF_H

#include "memtools.bpf.h"

/*
 * Bits of an address within its page, which is also the unit of vm_pgoff. Kernels with pages of 16
 * and 64 KiB are refused (src/run/aarch64.rs).
 */
#define PAGE_SHIFT 12

/* Sizes of blocks of pages, as powers of two: one more than any kernel with pages of 4 KiB has. */
#define PAGE_ORDERS 12

/*
 * Returns a number for the kernel's copy of the vdso that a process has mapped. All programs of 64
 * bits have the same one, and stacks are taken of these alone.
 */
static __always_inline __u64 vdso_of(struct mm_struct *mm)
{
	return 1;
}

#endif /* MEMTOOLS_ARCH_MEMORY_BPF_H */
