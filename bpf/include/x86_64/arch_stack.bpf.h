/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * How frames lie on the user stack of x86-64: where a return address is, at a
 * function's entry and below a CFA, and what the kernel leaves for a signal's handler.
 */
#ifndef MEMTOOLS_ARCH_STACK_BPF_H
#define MEMTOOLS_ARCH_STACK_BPF_H

#include "memtools.bpf.h"

/* The return address is in the word below the CFA. */
#define RETURN_ADDRESS_BELOW_CFA 8

/* An entry of the PLT has 16 bytes. From one of them on, it has pushed a word more. */
#define PLT_ENTRY_BYTES 16

/* What is on the stack of a signal handler, above its return address: struct ucontext. */
#define SIGNAL_FP 120
#define SIGNAL_SP 160
#define SIGNAL_PC 168

/* At a function's entry, where it returns to: the top of the stack. 0 if that is not readable. */
static __always_inline __u64 stack_return_address(struct pt_regs *ctx)
{
	__u64 return_address = 0, sp = PT_REGS_SP(ctx);

	bpf_probe_read_user(&return_address, sizeof(return_address), (void *)sp);
	return return_address;
}

/* What the stack pointer, `sp` at a function's entry, is once the function has returned. */
static __always_inline __u64 stack_pointer_after_return(__u64 sp)
{
	return sp + sizeof(long);
}

#endif /* MEMTOOLS_ARCH_STACK_BPF_H */
