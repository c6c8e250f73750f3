/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Checks of x86-64 machine code where a file's rules do not suffice: for the return from a signal's
 * handler, and for a call before a return address.
 */
#ifndef MEMTOOLS_ARCH_CODE_BPF_H
#define MEMTOOLS_ARCH_CODE_BPF_H

#include "memtools.bpf.h"

/*
 * First eight bytes of musl's rt_sigreturn(), which has no unwind information: mov $15,%rax;
 * syscall.
 */
#define SIGRETURN_CODE 0x0f0000000fc0c748ULL

/* Whether the code at `pc` returns from a signal's handler. */
static __always_inline int code_is_sigreturn(__u64 pc)
{
	__u64 code = 0;

	return !bpf_probe_read_user(&code, sizeof(code), (void *)pc) && code == SIGRETURN_CODE;
}

/*
 * Whether a call returns to `pc`: E8 and a distance precede it, or FF /2 and its operand. No call
 * returns to the end of a fiber: its address was put on the fiber's new stack as a return address
 * (boost.context). Returns 1 if the code cannot be read.
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
