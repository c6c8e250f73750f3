/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * What the machine code of x86-64 tells where a file's rules do not: the return from
 * a signal's handler, and whether a call returns to an address.
 */
#ifndef MEMTOOLS_ARCH_CODE_BPF_H
#define MEMTOOLS_ARCH_CODE_BPF_H

#include "memtools.bpf.h"

/*
 * musl's rt_sigreturn() has no unwind information: mov $15,%rax; syscall. Only
 * its first eight bytes are looked at.
 */
#define SIGRETURN_CODE 0x0f0000000fc0c748ULL

/* Whether the code at `pc` returns from a signal's handler. */
static __always_inline int code_is_sigreturn(__u64 pc)
{
	__u64 code = 0;

	return !bpf_probe_read_user(&code, sizeof(code), (void *)pc) && code == SIGRETURN_CODE;
}

/*
 * Whether a call returns to `pc`: before it are E8 and a distance, or FF /2 and its
 * operand. No call does to where a fiber is told to end, by a return address on its
 * new stack (boost.context). 1 if the code cannot be read.
 */
static __always_inline int code_call_returns_to(__u64 pc)
{
	__u64 code; /* the byte at pc - 8 is the lowest */

	if (bpf_probe_read_user(&code, sizeof(code), (void *)(pc - sizeof(code))))
		return 1;
	return (code >> 24 & 0xff) == 0xe8 || (code >> 48 & 0x38ff) == 0x10ff ||
	       (code >> 40 & 0x38ff) == 0x10ff || (code >> 32 & 0x38ff) == 0x10ff ||
	       (code >> 16 & 0x38ff) == 0x10ff || (code >> 8 & 0x38ff) == 0x10ff;
}

#endif /* MEMTOOLS_ARCH_CODE_BPF_H */
