/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * A walk that adds the frames of Python functions behind those of the loop that
 * executes them.
 */
#ifndef MEMTOOLS_STACK_PYTHON_BPF_H
#define MEMTOOLS_STACK_PYTHON_BPF_H

#include "python.bpf.h"
#include "stack_step.bpf.h"

/*
 * Add the group of Python's frames whose turn it is, behind the frame that was added
 * last if that is the loop's. Returns 0 if there is no room for it.
 */
__noinline int stack_push_group(__u32 index, __u32 paired)
{
	struct stack_slot *slot = bpf_map_lookup_elem(&stack_slots, &index);
	struct python_slot *python = bpf_map_lookup_elem(&python_slots, &index);
	__u64 group, done, end;

	if (!slot || !python)
		return 0;
	/*
	 * Where in its function the loop calls depends on the instruction, and on how
	 * often that was executed. It does not make the stack another one.
	 */
	if (paired) {
		slot->walk.id = python->id;
		slot->walk.check = python->check;
		stack_hash_add(&slot->walk.id, &slot->walk.check, PYTHON_WORD);
	}
	group = python->group;
	end = python->words;
	barrier_var(group);
	if (group < python->groups && group < PYTHON_GROUPS)
		end = python->ends[group];
	for (int i = 0; i < PYTHON_FRAMES; i++) {
		done = python->done;
		barrier_var(done);
		if (done >= end || done >= PYTHON_FRAMES)
			break;
		if (!stack_push(slot, python->word[done], 0))
			return 0;
		python->done = done + 1;
	}
	group++;
	python->group = group;
	python->next_anchor = 0;
	barrier_var(group);
	if (group < python->groups && group < PYTHON_GROUPS)
		python->next_anchor = python->anchors[group];
	return 1;
}

/* Add the groups of Python's frames whose loops are not among the native frames, marked so. */
__noinline int stack_push_unpaired(__u32 index)
{
	struct stack_slot *slot = bpf_map_lookup_elem(&stack_slots, &index);
	struct python_slot *python = bpf_map_lookup_elem(&python_slots, &index);

	if (!slot || !python)
		return 0;
	if (python->done < python->words) {
		if (!stack_push(slot, PYTHON_WORD | PYTHON_UNPAIRED, 0))
			return 0;
		for (int i = 0; i <= PYTHON_GROUPS && python->done < python->words; i++)
			if (!stack_push_group(index, 0))
				return 0;
	}
	if (python->cut)
		stack_push(slot, PYTHON_WORD | PYTHON_CUT, 0);
	return 0;
}

/* Walk on, and add Python's frames where they belong. */
static __always_inline void stack_walk_with_python(__u32 index, struct stack_slot *slot)
{
	struct python_slot *python = bpf_map_lookup_elem(&python_slots, &index);

	if (!python || !python_walked(index))
		return;
	for (int i = 0; i < STACK_MAX_STEPS; i++) {
		__u64 sp = slot->walk.sp;

		python->id = slot->walk.id;
		python->check = slot->walk.check;
		if (!stack_step(index))
			break;
		/* What a signal has interrupted may be on another stack. */
		if (python->next_anchor && !slot->walk.interrupted &&
		    python->next_anchor - sp < slot->walk.sp - sp && !stack_push_group(index, 1))
			break;
	}
	stack_push_unpaired(index);
}

#endif /* MEMTOOLS_STACK_PYTHON_BPF_H */
