/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Layout of frames on the user stack of arm64: the return address at a function's entry, and the
 * frame that the kernel leaves for a signal's handler.
 */
#ifndef MEMTOOLS_ARCH_STACK_BPF_H
#define MEMTOOLS_ARCH_STACK_BPF_H

#include "arch_registers.bpf.h"

/*
 * Offsets in struct rt_sigframe, which is at the stack pointer when a signal's handler has
 * returned: siginfo (128 bytes), ucontext up to uc_mcontext (176), the fault's address, x0 to x30,
 * the stack pointer, the program counter.
 */
#define SIGNAL_REGISTERS (128 + 176 + 8)
#define SIGNAL_FP	 (SIGNAL_REGISTERS + 8 * FRAME_POINTER)
#define SIGNAL_LINK	 (SIGNAL_REGISTERS + 8 * LINK)
#define SIGNAL_SP	 (SIGNAL_REGISTERS + 8 * 31)
#define SIGNAL_PC	 (SIGNAL_REGISTERS + 8 * 32)

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

/* Returns the return address at a probe that is in the link register. */
static __always_inline __u64 stack_link(struct pt_regs *ctx)
{
	__u64 link = PT_REGS_RET(ctx);

	barrier_var(link);
	return code_address(link);
}

/* Returns the return address of a function at its entry. */
static __always_inline __u64 stack_return_address(struct pt_regs *ctx)
{
	return stack_link(ctx);
}

/*
 * Whether the return address of a call that had this stack pointer at its entry can still be
 * `returns_to`. Functions store it at a place of their own: only the walk can find it
 * (stack_returns_from()).
 */
static __always_inline int stack_keeps_return_address(__u64 sp, __u64 returns_to)
{
	return 1;
}

/* Returns the CFA at an instruction of a PLT entry, which leaves the stack pointer alone. */
static __always_inline __u64 stack_plt_cfa(__u64 sp, __u64 pc, long pushed)
{
	return sp;
}

/* Returns the stack pointer after a function has returned; at its entry it was `sp`. */
static __always_inline __u64 stack_pointer_after_return(__u64 sp)
{
	return sp;
}

#endif /* MEMTOOLS_ARCH_STACK_BPF_H */
