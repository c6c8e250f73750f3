/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * How a walk leaves a frame on arm64: where the return address and the caller's registers are.
 *
 * The kernel notes a pending return probe by the stack pointer at the function's entry, which is
 * the CFA: walk.pc_at.
 */
#ifndef MEMTOOLS_ARCH_STEP_BPF_H
#define MEMTOOLS_ARCH_STEP_BPF_H

#include "arch_stack.bpf.h"
#include "return_probe.bpf.h"
#include "stack_walk.bpf.h"

/* Notes the return address of the innermost frame that is in the link register; 0: unknown. */
static __always_inline void stack_set_link(struct stack_walk *walk, __u64 link)
{
	walk->link = link;
	walk->sp_is_lost = 0;
}

/* As stack_set_link(), from the frame of a signal at `sp`. Returns 0 at the end of the walk. */
static __always_inline int stack_restore_link(struct stack_slot *slot, __u64 sp)
{
	if (!stack_word(slot, sp + SIGNAL_LINK))
		return stack_end(slot, STACK_END_UNREADABLE);
	stack_set_link(&slot->walk, code_address(slot->walk.word));
	return 1;
}

/*
 * Returns the stack pointer of the frame that the walk has reached. After a step by frame pointers
 * it is known by the frame's own record, to which the frame pointer points: the rule says where in
 * the frame the record is.
 */
static __always_inline __u64 stack_base(struct stack_walk *walk, __u64 row)
{
	__u64 saved = row_frame_pointer(row);
	__u64 record = walk->fp - row_fp_offset(row) * 8;

	if (!walk->sp_is_lost)
		return walk->sp;
	if (saved == UNWIND_FP_AT_BASE)
		return record;
	return saved == UNWIND_FP_AT_CFA ? record - row_cfa_offset(row) * 8 : walk->sp;
}

/*
 * Whether the return address that the walk has found at a call's place is that of the call, or one
 * that a return probe has replaced.
 */
static __always_inline int stack_returns_from(struct stack_walk *walk, __u64 returns_to)
{
	return walk->pc == returns_to || stack_original_return_address(walk->pc_at) == returns_to;
}

/*
 * Goes to the caller by the frame record at the frame pointer, whose second word has been read. The
 * record can be anywhere in its frame.
 */
static __always_inline void stack_leave_record(struct stack_walk *walk, __u64 fp, __u64 caller_fp)
{
	walk->pc = code_address(walk->word);
	walk->pc_at = 0;
	walk->sp = fp + 16;
	walk->sp_is_lost = 1;
	walk->fp = caller_fp;
	walk->link = 0;
	walk->interrupted = 0;
}

/*
 * Goes to the caller of a frame with this rule and this CFA, whose return address is still in the
 * link register. Returns 0 if the register has changed: only the innermost frame has it, or one
 * that a signal has interrupted. The frame may be empty.
 */
static __always_inline int stack_leave_by_link(struct stack_slot *slot, __u64 row, __u64 cfa)
{
	struct stack_walk *walk = &slot->walk;

	if (!walk->link)
		return stack_without_rule(slot, row);
	walk->pc = walk->link;
	walk->pc_at = cfa;
	walk->sp = cfa;
	walk->link = 0;
	walk->interrupted = 0;
	return 1;
}

/* Goes to the caller of a frame with this rule and this CFA. Returns 0 if there is none. */
static __always_inline int stack_leave_frame(struct stack_slot *slot, __u64 row, __u64 cfa)
{
	struct stack_walk *walk = &slot->walk;
	__u64 saved = row_frame_pointer(row), at = cfa, fp_at = 0;

	if (cfa < walk->sp || cfa & 7)
		return stack_end(slot, STACK_END_BACKWARDS);
	if (saved == UNWIND_FP_KEPT)
		return stack_leave_by_link(slot, row, cfa);
	if (cfa == walk->sp)
		return stack_end(slot, STACK_END_BACKWARDS);
	if (saved == UNWIND_FP_AT_BASE || saved == UNWIND_LINK_AT_BASE)
		at = cfa - row_cfa_offset(row) * 8;
	at += row_fp_offset(row) * 8;
	if (saved == UNWIND_FP_AT_CFA || saved == UNWIND_FP_AT_BASE) {
		fp_at = at;
		at += 8;
	} else if (saved == UNWIND_FP_BELOW) {
		fp_at = at - 16;
	}
	if (fp_at) {
		if (!stack_word(slot, fp_at))
			return stack_end(slot, STACK_END_UNREADABLE);
		walk->fp = walk->word;
	}
	if (!stack_word(slot, at))
		return stack_end(slot, STACK_END_UNREADABLE);
	walk->pc = code_address(walk->word);
	walk->pc_at = cfa;
	walk->sp = cfa;
	walk->sp_is_lost = 0;
	walk->link = 0;
	walk->interrupted = 0;
	return walk->pc ? 1 : stack_end(slot, STACK_END_ROOT);
}

#endif /* MEMTOOLS_ARCH_STEP_BPF_H */
