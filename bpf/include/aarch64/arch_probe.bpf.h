/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * The general registers of arm64 at a probe, by their numbers in instructions.
 */
#ifndef MEMTOOLS_ARCH_PROBE_BPF_H
#define MEMTOOLS_ARCH_PROBE_BPF_H

#include "memtools.bpf.h"

#define READ_REGISTER(wanted)                                                                      \
	if (number == (wanted))                                                                    \
		value = ((struct user_pt_regs *)ctx)->regs[wanted];                                \
	barrier_var(value)

/*
 * Registers are read at constant offsets, as the verifier requires. These are the ones that a field
 * of a signature can name.
 */
static __noinline __u64 register_with(struct pt_regs *ctx, __u32 number)
{
	__u64 value = 0;

	READ_REGISTER(0);
	READ_REGISTER(1);
	READ_REGISTER(2);
	READ_REGISTER(3);
	READ_REGISTER(4);
	READ_REGISTER(5);
	READ_REGISTER(6);
	READ_REGISTER(7);
	READ_REGISTER(8);
	READ_REGISTER(9);
	READ_REGISTER(10);
	READ_REGISTER(11);
	READ_REGISTER(12);
	READ_REGISTER(13);
	READ_REGISTER(14);
	READ_REGISTER(15);
	return value;
}

#endif /* MEMTOOLS_ARCH_PROBE_BPF_H */
