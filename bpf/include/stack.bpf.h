/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * User call stacks. This is for uprobes; task_stack.bpf.h takes the user stack in programs of any
 * other type, and kernel_stack.bpf.h puts kernel stacks into the same table.
 *
 * Most code is built without frame pointers. Its callers are found by the rules of unwind.bpf.h,
 * and callers of Java code by hotspot.bpf.h. Where there are no rules (other generated code, a file
 * that user space has not looked at yet, a file whose rules did not fit), callers are found by
 * frame pointers. An address that is in no code of the process ends the walk: it is not taken for a
 * frame.
 *
 * A walk (stack_walk.bpf.h) goes step by step (stack_step.bpf.h), and adds Python frames if the
 * process has any (stack_python.bpf.h).
 */
#ifndef MEMTOOLS_STACK_BPF_H
#define MEMTOOLS_STACK_BPF_H

#include "stack_step.bpf.h"

/* Counts the end of the walk, and stores the stack. Returns its id. */
static __noinline __u64 stack_finish(struct stack_slot *slot)
{
	struct stack_walk *walk = &slot->walk;
	__u64 end = slot->stack.end;

	if (end == STACK_END_DEPTH)
		count_loss(deep_stacks);
	barrier_var(end);
	if (end < STACK_ENDS)
		slot->ends[end]++;
	if (walk->process)
		slot->frame_pointer_steps += slot->stack.frame_pointer_steps;
	/*
	 * Of two stacks that differ only in their end, one was walked before its tables were ready.
	 */
	stack_hash_add(&walk->id, &walk->check, end);
	return stack_put(slot, walk->id, walk->check);
}

/*
 * Returns the id in the table of the user stack whose innermost frame is at `pc`, with these stack
 * and frame pointers. `interrupted` is 1 if the task was interrupted at `pc`, 0 if `pc` is a return
 * address. `link` is the return address that is still in a register; 0 if none is.
 */
__noinline __u64 stack_id(__u64 pc, __u64 sp, __u64 fp, __u64 interrupted, __u64 link)
{
	__u32 index = stack_slot_take();
	struct stack_slot *slot = bpf_map_lookup_elem(&stack_slots, &index);
	__u64 id;

	if (!slot) {
		count_loss(busy_stacks);
		return STACK_LOST;
	}
	stack_begin(index, pc, sp, fp, interrupted);
	stack_set_link(&slot->walk, link);
	if (interpreters && python_met)
		stack_begin_python(index, slot);
	CALL_LOOP (long i = 0; i < STACK_ROUNDS; i++)
		if (!stack_round(index))
			break;
	if (interpreters && slot->walk.with_python)
		stack_push_unpaired(index);
	if (interpreters && slot->walk.interpreter & UNWIND_PYTHON)
		python_request(&slot->walk);
	if (interpreters && slot->walk.interpreter & UNWIND_HOTSPOT)
		hotspot_request(slot->walk.layout);
	id = stack_finish(slot);
	stack_slot_give_back(slot);
	return id;
}

/* Result so far of a walk to a call. */
enum stack_call {
	STACK_CALL_AHEAD, /* not reached yet: the walk goes on */
	STACK_CALL_FOUND, /* the call is among the callers, or this cannot be known */
	STACK_CALL_PAST,  /* the call is not among the callers */
};

/*
 * Walks a round of steps to the allocator's call whose return address, `returns_to`, is at
 * `address`.
 */
__noinline int stack_round_to(__u32 index, __u64 address, __u64 returns_to)
{
	struct stack_slot *slot = bpf_map_lookup_elem(&stack_slots, &index);
	int more;

	if (!slot)
		return STACK_CALL_FOUND;
	CALL_LOOP (long i = 0; i < STACK_ROUND_STEPS; i++) {
		if (slot->walk.pc_at == address)
			return stack_returns_from(&slot->walk, returns_to) ? STACK_CALL_FOUND
									   : STACK_CALL_PAST;
		if (slot->walk.sp > address)
			return slot->stack.frame_pointer_steps ? STACK_CALL_FOUND : STACK_CALL_PAST;
		more = stack_step(index);
		/* An allocator's functions are in files, and never call generated code. */
		if (slot->walk.generated_depth)
			return STACK_CALL_PAST;
		if (!more)
			return slot->stack.end == STACK_END_ROOT ? STACK_CALL_PAST
								 : STACK_CALL_FOUND;
	}
	return STACK_CALL_AHEAD;
}

/*
 * Whether the call whose return address, `returns_to`, is at `address` is among the callers of the
 * frame that stack_id() would begin with. Returns 1 also if this cannot be known: if the walk ends
 * before, or went by frame pointers, which skip frames.
 */
__noinline int stack_comes_from(__u64 pc, __u64 sp, __u64 fp, __u64 address, __u64 returns_to)
{
	__u32 index = stack_slot_take();
	struct stack_slot *slot = bpf_map_lookup_elem(&stack_slots, &index);
	int found = STACK_CALL_AHEAD;

	if (!slot)
		return 1;
	stack_begin(index, pc, sp, fp, 0);
	stack_set_link(&slot->walk, 0);
	CALL_LOOP (long i = 0; i < STACK_CALL_ROUNDS && found == STACK_CALL_AHEAD; i++)
		found = stack_round_to(index, address, returns_to);
	stack_slot_give_back(slot);
	return found != STACK_CALL_PAST;
}

/*
 * Returns the stack of the caller of a function that has just returned. The program counter is then
 * the return address, so the caller is always in the stack, even if neither it nor the function
 * keeps a frame pointer.
 */
static __always_inline __u64 stack_of_caller_at_return(struct pt_regs *ctx)
{
	return stack_id(PT_REGS_IP(ctx), stack_pointer(ctx), PT_REGS_FP(ctx), 0, 0);
}

/* Returns the stack of a function's caller at the function's entry. */
static __always_inline __u64 stack_of_caller_at_entry(struct pt_regs *ctx)
{
	return stack_id(stack_return_address(ctx), stack_pointer_after_return(stack_pointer(ctx)),
			PT_REGS_FP(ctx), 0, 0);
}

/* Returns the stack whose innermost frame is the function that a probe is in. */
static __always_inline __u64 stack_of_function(struct pt_regs *ctx)
{
	return stack_id(PT_REGS_IP(ctx), stack_pointer(ctx), PT_REGS_FP(ctx), 1, stack_link(ctx));
}

#endif /* MEMTOOLS_STACK_BPF_H */
