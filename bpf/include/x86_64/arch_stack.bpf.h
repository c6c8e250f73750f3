/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Layout of frames on the user stack of x86-64: the return address at a function's entry and below
 * a CFA, and the frame that the kernel leaves for a signal's handler.
 */
#ifndef MEMTOOLS_ARCH_STACK_BPF_H
#define MEMTOOLS_ARCH_STACK_BPF_H

#include "memtools.bpf.h"

/* Size of an entry of the PLT, in bytes. */
#define PLT_ENTRY_BYTES 16

/*
 * Offsets in struct ucontext, which is on the stack of a signal's handler, above its return
 * address.
 */
#define SIGNAL_FP 120
#define SIGNAL_SP 160
#define SIGNAL_PC 168

/*
 * Returns the stack pointer at a probe. The barrier keeps clang from merging this load with one of
 * another register, at an offset that the verifier does not know.
 */
static __always_inline __u64 stack_pointer(struct pt_regs *ctx)
{
	__u64 sp = PT_REGS_SP(ctx);

	barrier_var(sp);
	return sp;
}

/*
 * Returns the return address of a function at its entry: the top of the stack. 0 if that cannot be
 * read.
 */
static __always_inline __u64 stack_return_address(struct pt_regs *ctx)
{
	__u64 return_address = 0, sp = stack_pointer(ctx);

	bpf_probe_read_user(&return_address, sizeof(return_address), (void *)sp);
	return return_address;
}

/* Returns the return address at a probe that is in a register: on x86-64, none is. */
static __always_inline __u64 stack_link(struct pt_regs *ctx)
{
	return 0;
}

/*
 * Whether the return address of a call that had this stack pointer at its entry can still be
 * `returns_to`: it is in memory, until another call overwrites it.
 */
static __always_inline int stack_keeps_return_address(__u64 sp, __u64 returns_to)
{
	__u64 found = 0;

	bpf_probe_read_user(&found, sizeof(found), (void *)sp);
	return found == returns_to;
}

/*
 * Returns the CFA at an instruction of a PLT entry. From the entry's byte `pushed` on, the entry
 * has pushed a word more.
 */
static __always_inline __u64 stack_plt_cfa(__u64 sp, __u64 pc, long pushed)
{
	return sp + 8 + ((long)(pc & (PLT_ENTRY_BYTES - 1)) >= pushed ? 8 : 0);
}

/* Returns the stack pointer after a function has returned; at its entry it was `sp`. */
static __always_inline __u64 stack_pointer_after_return(__u64 sp)
{
	return sp + sizeof(long);
}

#endif /* MEMTOOLS_ARCH_STACK_BPF_H */
