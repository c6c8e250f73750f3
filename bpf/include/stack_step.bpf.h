/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * One step of a walk, from a frame to its caller: by a rule for its code, by HotSpot's description
 * of generated code, by frame pointers, through the frame of a signal, or through the trampoline of
 * a return probe.
 */
#ifndef MEMTOOLS_STACK_STEP_BPF_H
#define MEMTOOLS_STACK_STEP_BPF_H

#include "arch_registers.bpf.h"
#include "arch_step.bpf.h"
#include "hotspot.bpf.h"
#include "return_probe.bpf.h"
#include "stack_python.bpf.h"

/* A frame record farther from the stack pointer than this is treated as a stray value. */
#define STACK_MAX_FRAME_BYTES (16 << 20)

/* Steps of a walk, in rounds. A frame may take a second step, for a return probe. */
#define STACK_ROUND_STEPS 17
#define STACK_ROUNDS	  17
_Static_assert(STACK_MAX_DEPTH + 32 < STACK_ROUNDS * STACK_ROUND_STEPS, "too few steps");

/* Rounds of a walk to an outer call, from a function that it has called (stack_comes_from()). */
#define STACK_CALL_ROUNDS 10

/*
 * Goes to the caller by the frame record at the frame pointer: the caller's frame pointer, and the
 * return address above it.
 */
static __noinline int stack_by_frame_pointer(struct stack_slot *slot, __u64 row)
{
	struct stack_walk *walk = &slot->walk;
	__u64 fp = walk->fp, sp = walk->sp, caller_fp;

	if (walk->process && row == UNWIND_NO_RULE && !walk->generated_depth) {
		walk->generated_id = walk->id;
		walk->generated_check = walk->check;
		walk->generated_depth = slot->stack.depth;
	}
	/*
	 * By the ABI, the outermost frame has frame pointer 0; in code with rules, it is any
	 * number.
	 */
	if (!fp && walk->process && row_kind(row) == UNWIND_NO_RULE)
		return stack_end(slot, STACK_END_ROOT);
	if (!walk->process && unwind_mode == UNWIND_MODE_DWARF)
		goto none;
	if (fp & 7 || fp < sp || fp - sp > STACK_MAX_FRAME_BYTES)
		goto none;
	if (!stack_word(slot, fp))
		goto none;
	caller_fp = walk->word;
	if (!stack_word(slot, fp + 8) || !walk->word)
		goto none;
	stack_leave_record(walk, fp, caller_fp);
	slot->stack.frame_pointer_steps++;
	return 1;
none:
	if (!walk->process)
		return stack_end(slot, unwind_mode == UNWIND_MODE_FP ? STACK_END_FRAME_POINTER
								     : STACK_END_NO_TABLES);
	return stack_without_rule(slot, row);
}

/* Goes to the frame that a signal has interrupted. */
static __noinline int stack_by_signal(struct stack_slot *slot)
{
	struct stack_walk *walk = &slot->walk;
	__u64 sp = walk->sp;

	if (!stack_word(slot, sp + SIGNAL_FP))
		return stack_end(slot, STACK_END_UNREADABLE);
	walk->fp = walk->word;
	if (!stack_word(slot, sp + SIGNAL_PC))
		return stack_end(slot, STACK_END_UNREADABLE);
	walk->pc = walk->word;
	if (!stack_word(slot, sp + SIGNAL_SP))
		return stack_end(slot, STACK_END_UNREADABLE);
	/* The interrupted frame can be on another stack than the handler's (sigaltstack). */
	walk->sp = walk->word;
	walk->pc_at = 0;
	walk->interrupted = 1;
	return stack_restore_link(slot, sp);
}

/* Returns the CFA by a rule; 0: none. */
static __always_inline __u64 stack_cfa(struct stack_slot *slot, __u64 row)
{
	struct stack_walk *walk = &slot->walk;
	__u64 kind = row_kind(row), base = stack_base(walk, row);
	long offset = row_cfa_offset(row);

	if (kind == UNWIND_BY_SP)
		return base + offset * 8;
	if (kind == UNWIND_PLT)
		return stack_plt_cfa(base, walk->pc, offset);
	if (kind == UNWIND_BY_FP || kind == UNWIND_THROUGH_FP || kind == UNWIND_INTERPRETED) {
		base = walk->fp;
		if (base & 7)
			return 0;
	}
	if (kind == UNWIND_BY_FP || kind == UNWIND_INTERPRETED)
		return base + offset * 8;
	if (!stack_word(slot, base + row_through_offset(row) * 8))
		return 0;
	return walk->word + row_behind_offset(row) * 8;
}

/* Goes to the caller by a rule. Returns 0 if there is none. */
static __noinline int stack_by_rule(struct stack_slot *slot, __u64 row)
{
	__u64 cfa = stack_cfa(slot, row);

	return cfa ? stack_leave_frame(slot, row, cfa) : stack_end(slot, STACK_END_UNREADABLE);
}

/*
 * Goes to the caller of an interrupted function whose rule is by a register other than the stack
 * and frame pointers: while a function takes a large frame page by page, that is all that leads to
 * its caller.
 */
static __noinline int stack_by_register(struct stack_slot *slot, __u64 row)
{
	struct stack_walk *walk = &slot->walk;
	__u64 base = user_register_at(walk->pc, walk->sp, row_register(row));
	__u64 words = row_cfa_offset(row);

	if (!base)
		return stack_without_rule(slot, row);
	walk->sp = base;
	return stack_by_rule(slot, row_of_kind(UNWIND_BY_SP, words));
}

/*
 * Goes to the caller of a function that HotSpot interprets. The function's frame notes where the
 * caller's stack ended: below it there may be space for variables, and a method handle may have
 * taken a word of it.
 */
static __noinline int stack_by_interpreter(struct stack_slot *slot, __u64 row)
{
	struct stack_walk *walk = &slot->walk;
	__u64 sp;

	if (!stack_word(slot, walk->fp + INTERPRETED_CALLER_SP))
		return stack_end(slot, STACK_END_UNREADABLE);
	sp = walk->word;
	if (!stack_by_rule(slot, row))
		return 0;
	if (sp & 7 || sp + 8 - walk->sp > STACK_MAX_FRAME_BYTES)
		return stack_end(slot, STACK_END_BACKWARDS);
	walk->sp = sp;
	return 1;
}

/*
 * Adds the frame of a function that HotSpot interprets, by its Method and the bytecode that it
 * calls from: the interpreter's code is the same for all functions.
 */
static __noinline int stack_push_interpreted(struct stack_slot *slot)
{
	struct stack_walk *walk = &slot->walk;
	__u64 word;

	if (!stack_word(slot, walk->fp + INTERPRETED_METHOD) || !walk->word || walk->word & 7 ||
	    walk->word >> INTERPRETED_ADDRESS_BITS)
		return stack_push_walked(slot);
	word = 1ULL << HOTSPOT_INTERPRETED_BIT | walk->word >> 3;
	/*
	 * In an interrupted function, the bytecode that is noted is that of an earlier call; a
	 * native function has none.
	 */
	if (!walk->interrupted && stack_word(slot, walk->fp + INTERPRETED_BYTECODE) && walk->word)
		word |= 1ULL << HOTSPOT_BYTECODE_BIT | (walk->word & 0xffff)
							   << HOTSPOT_BYTECODE_SHIFT;
	return stack_push(slot, word, 0);
}

/*
 * Replaces a return probe's address, if the walk has come to one, by the original return address.
 * Returns 0 if it has not.
 */
static __noinline int stack_replace_return_probe(struct stack_slot *slot)
{
	struct stack_walk *walk = &slot->walk;
	__u64 returns_to = walk->pc_at ? stack_original_return_address(walk->pc_at) : 0;

	if (!returns_to)
		return 0;
	walk->pc = returns_to;
	walk->pc_at = 0;
	return 1;
}

/* Handles an address that is in no code. Returns 0 if the walk ends there. */
static __always_inline int stack_out_of_code(struct stack_slot *slot)
{
	struct stack_walk *walk = &slot->walk;

	if (stack_replace_return_probe(slot))
		return 1;
	/* An address from a register is code, even if no mapping of it is known. */
	if (!walk->pc_at && !stack_push_walked(slot))
		return 0;
	return stack_end(slot, STACK_END_NO_CODE);
}

/*
 * Cuts the stack where frame pointers were first followed through generated code. The walk has come
 * from generated code to HotSpot: so that code was HotSpot's, and its frame pointers have skipped
 * callers.
 */
static __noinline int stack_cut_generated(struct stack_slot *slot)
{
	struct stack_walk *walk = &slot->walk;

	walk->id = walk->generated_id;
	walk->check = walk->generated_check;
	slot->stack.depth = walk->generated_depth;
	return stack_without_rule(slot, UNWIND_NO_RULE);
}

/*
 * Handles an address that is in no file: the page of the return probes, or generated code of no
 * known HotSpot. Returns 1 if the walk goes on from the return address that a probe has replaced.
 *
 * For known code of HotSpot, return probes are not checked: that takes twice the time of its row.
 */
static __always_inline int stack_out_of_files(struct stack_slot *slot)
{
	if (stack_replace_return_probe(slot))
		return 1;
	/* The code may be that of a process whose HotSpot is still to be found. */
	if (interpreters && hotspot_met)
		slot->walk.interpreter |= UNWIND_HOTSPOT;
	return 0;
}

/*
 * Walks one step: adds the frame, and goes on to its caller; or adds a Python frame, if one is due.
 * Returns 0 at the end.
 *
 * Global, so that the verifier follows the function once and not again for each frame.
 */
__noinline int stack_step(__u32 index)
{
	struct stack_slot *slot = bpf_map_lookup_elem(&stack_slots, &index);
	struct stack_walk *walk;
	__u64 row = UNWIND_NO_RULE, kind;
	int due;

	if (!slot)
		return 0;
	walk = &slot->walk;
	if (interpreters && walk->with_python) {
		due = stack_push_due(index);
		if (due != STACK_NONE_DUE)
			return due == STACK_PUSHED;
		walk->last_id = walk->id;
		walk->last_check = walk->check;
		walk->last_sp = walk->sp;
	}
	if (walk->process) {
		row = unwind_row(walk->process, walk->pc << 1 | walk->interrupted, index);
		if (row_kind(row) == UNWIND_NO_CODE)
			return stack_out_of_code(slot);
		if (row == UNWIND_NO_RULE && interpreters && hotspot_met)
			row = hotspot_row(walk->layout, walk->pc << 1 | walk->interrupted);
		if (row == UNWIND_NO_RULE && stack_out_of_files(slot))
			return 1;
		if (walk->generated_depth && row_file(row) & UNWIND_SKIPS)
			return stack_cut_generated(slot);
		walk->interpreter |= row_file(row) & (UNWIND_PYTHON | UNWIND_HOTSPOT);
	}
	kind = row_kind(row);
	/* A fiber's end begins at this address: no call lies before it. */
	if (kind == UNWIND_FIBER_END)
		walk->interrupted = 1;
	if (kind == UNWIND_INTERPRETED ? !stack_push_interpreted(slot) : !stack_push_walked(slot))
		return 0;
	if (row_is_plain(row))
		return stack_by_rule(slot, row);
	/* User space is asked here and not in unwind_row(): programs may be eight calls deep. */
	if (kind == UNWIND_NO_TABLE)
		unwind_request_file(index);
	/* The frame pointer of such code is any number: from here on the walk may skip frames. */
	if (kind == UNWIND_NO_ROOM || kind == UNWIND_NO_TABLE)
		walk->process = 0;
	if (kind == UNWIND_NO_RULE || !walk->process)
		return stack_by_frame_pointer(slot, row);
	if (kind == UNWIND_ROOT || kind == UNWIND_FIBER_END)
		return stack_end(slot, STACK_END_ROOT);
	if (kind == UNWIND_IN_JAVA_HEAP)
		return stack_end(slot, STACK_END_IN_JAVA_HEAP);
	if (kind == UNWIND_SIGNAL)
		return stack_by_signal(slot);
	if (kind == UNWIND_INTERPRETED)
		return stack_by_interpreter(slot, row);
	if (kind == UNWIND_BY_REGISTER)
		return stack_by_register(slot, row);
	return stack_without_rule(slot, row);
}

/*
 * Walks a round of steps. Returns 0 at the end.
 *
 * The verifier follows each iteration of a loop, and keeps the states that it has seen in kernel
 * memory: with rounds, 34 iterations for 289 steps.
 */
__noinline int stack_round(__u32 index)
{
	CALL_LOOP (long i = 0; i < STACK_ROUND_STEPS; i++)
		if (!stack_step(index))
			return 0;
	return 1;
}

#endif /* MEMTOOLS_STACK_STEP_BPF_H */
