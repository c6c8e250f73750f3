/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * The general registers of x86-64 at a probe, by their numbers in instructions.
 *
 * Another architecture has a file of this name in a directory of its own, with the same function.
 */
#ifndef MEMTOOLS_ARCH_PROBE_BPF_H
#define MEMTOOLS_ARCH_PROBE_BPF_H

#include "memtools.bpf.h"

#define READ_REGISTER(wanted, name)                                                                \
	if (number == (wanted))                                                                    \
		value = ctx->name;                                                                 \
	barrier_var(value)

/* Registers are read at constant offsets, as the verifier requires. */
static __noinline __u64 register_with(struct pt_regs *ctx, __u32 number)
{
	__u64 value = 0;

	READ_REGISTER(0, ax);
	READ_REGISTER(1, cx);
	READ_REGISTER(2, dx);
	READ_REGISTER(3, bx);
	READ_REGISTER(4, sp);
	READ_REGISTER(5, bp);
	READ_REGISTER(6, si);
	READ_REGISTER(7, di);
	READ_REGISTER(8, r8);
	READ_REGISTER(9, r9);
	READ_REGISTER(10, r10);
	READ_REGISTER(11, r11);
	READ_REGISTER(12, r12);
	READ_REGISTER(13, r13);
	READ_REGISTER(14, r14);
	READ_REGISTER(15, r15);
	return value;
}

#endif /* MEMTOOLS_ARCH_PROBE_BPF_H */
