/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Pages of x86-64, and the code that the kernel maps into each process (vdso).
 */
#ifndef MEMTOOLS_ARCH_MEMORY_BPF_H
#define MEMTOOLS_ARCH_MEMORY_BPF_H

#include "memtools.bpf.h"

/* Bits of an address within its page, which is also the unit of vm_pgoff. */
#define PAGE_SHIFT 12

/* Sizes of blocks of pages, as powers of two: one more than any kernel has. */
#define PAGE_ORDERS 12

/*
 * Returns the address of the kernel's copy of the vdso that a process has mapped. Programs of 64
 * and of 32 bits have different ones.
 */
static __always_inline __u64 vdso_of(struct mm_struct *mm)
{
	return (__u64)BPF_CORE_READ(mm, context.vdso_image);
}

#endif /* MEMTOOLS_ARCH_MEMORY_BPF_H */
