/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Checks of arm64 machine code where a file's rules do not suffice: for the return from a signal's
 * handler, and for a call before a return address.
 */
#ifndef MEMTOOLS_ARCH_CODE_BPF_H
#define MEMTOOLS_ARCH_CODE_BPF_H

#include "memtools.bpf.h"

/* Code by which a signal's handler returns, in the vdso and in musl: mov x8,#139; svc #0. */
#define SIGRETURN_CODE 0xd4000001d2801168ULL

/* bl, and its mask. */
#define CALL	  0x94000000
#define CALL_MASK 0xfc000000
/* blr, and the forms of it that authenticate the address (blraa and so on), and their mask. */
#define CALL_REGISTER	   0xd63f0000
#define CALL_REGISTER_MASK 0xfefff000

/* Whether the code at `pc` returns from a signal's handler. */
static __always_inline int code_is_sigreturn(__u64 pc)
{
	__u64 code = 0;

	return !bpf_probe_read_user(&code, sizeof(code), (void *)pc) && code == SIGRETURN_CODE;
}

/*
 * Whether a call returns to `pc`. No call returns to the end of a fiber: its address was put on the
 * fiber's new stack as a return address (boost.context). Returns 1 if the code cannot be read.
 */
static __always_inline int code_call_returns_to(__u64 pc)
{
	__u32 code;

	if (bpf_probe_read_user(&code, sizeof(code), (void *)(pc - sizeof(code))))
		return 1;
	return (code & CALL_MASK) == CALL || (code & CALL_REGISTER_MASK) == CALL_REGISTER;
}

#endif /* MEMTOOLS_ARCH_CODE_BPF_H */
