/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * How a walk leaves a frame on x86-64: where the return address and the caller's registers are.
 */
#ifndef MEMTOOLS_ARCH_STEP_BPF_H
#define MEMTOOLS_ARCH_STEP_BPF_H

#include "arch_stack.bpf.h"
#include "stack_walk.bpf.h"

#define NO_FRAME_POINTER 1 /* or any odd number */

/* The return address is in the word below the CFA. */
#define RETURN_ADDRESS_BELOW_CFA 8

/*
 * Notes the return address of the innermost frame that is in a register: on x86-64, none is. The
 * barrier makes clang believe that the value is used: for an argument that a global function does
 * not use, callers pass whatever is in the register, which the verifier refuses.
 */
static __always_inline void stack_set_link(struct stack_walk *walk, __u64 link)
{
	barrier_var(link);
}

/* As stack_set_link(), from the frame of a signal at `sp`. Returns 0 at the end of the walk. */
static __always_inline int stack_restore_link(struct stack_slot *slot, __u64 sp)
{
	return 1;
}

/* Returns the stack pointer of the frame that the walk has reached. */
static __always_inline __u64 stack_base(struct stack_walk *walk, __u64 row)
{
	return walk->sp;
}

/*
 * Whether the return address that the walk has found at a call's place is that of the call:
 * stack_keeps_return_address() has compared it. For the barrier, see stack_set_link().
 */
static __always_inline int stack_returns_from(struct stack_walk *walk, __u64 returns_to)
{
	barrier_var(returns_to);
	return 1;
}

/*
 * Goes to the caller by the frame record at the frame pointer, whose second word has been read. The
 * call has pushed it.
 */
static __always_inline void stack_leave_record(struct stack_walk *walk, __u64 fp, __u64 caller_fp)
{
	walk->pc = walk->word;
	walk->pc_at = fp + 8;
	walk->sp = fp + 16;
	walk->fp = caller_fp;
	walk->interrupted = 0;
}

/*
 * Whether the caller's frame may be on another stack. Compilers make no such rule: where the
 * frame pointer is saved at itself, they base the CFA on something else.
 */
static __always_inline int row_switches_stack(__u64 row)
{
	return row_kind(row) == UNWIND_BY_FP && row_frame_pointer(row) == UNWIND_FP_AT_FP;
}

/* Goes to the caller of a frame with this rule and this CFA. Returns 0 if there is none. */
static __always_inline int stack_leave_frame(struct stack_slot *slot, __u64 row, __u64 cfa)
{
	struct stack_walk *walk = &slot->walk;
	__u64 fp = walk->fp, fp_rule = row_frame_pointer(row), fp_at;

	if ((cfa <= walk->sp && !row_switches_stack(row)) || cfa & 7)
		return stack_end(slot, STACK_END_BACKWARDS);
	if (fp_rule == UNWIND_FP_AT_CFA || fp_rule == UNWIND_FP_AT_FP) {
		fp_at = (fp_rule == UNWIND_FP_AT_CFA ? cfa : fp) + row_fp_offset(row) * 8;
		if (!stack_word(slot, fp_at))
			return stack_end(slot, STACK_END_UNREADABLE);
		fp = walk->word;
	} else if (fp_rule == UNWIND_FP_FORGOTTEN) {
		fp = NO_FRAME_POINTER;
	}
	if (!stack_word(slot, cfa - RETURN_ADDRESS_BELOW_CFA))
		return stack_end(slot, STACK_END_UNREADABLE);
	walk->pc = walk->word;
	walk->pc_at = cfa - RETURN_ADDRESS_BELOW_CFA;
	walk->sp = cfa;
	walk->fp = fp;
	walk->interrupted = 0;
	return walk->pc ? 1 : stack_end(slot, STACK_END_ROOT);
}

#endif /* MEMTOOLS_ARCH_STEP_BPF_H */
