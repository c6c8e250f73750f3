/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * A walk that adds the frames of Python functions behind those of the loop that
 * executes them.
 */
#ifndef MEMTOOLS_STACK_PYTHON_BPF_H
#define MEMTOOLS_STACK_PYTHON_BPF_H

#include "python.bpf.h"
#include "stack_step.bpf.h"

enum stack_pushed {
	STACK_NO_ROOM, /* of the stack */
	STACK_PUSHED,
	STACK_NO_MORE, /* in the group */
};

/*
 * Add the next frame of the group of Python's whose turn it is. Returns enum stack_pushed.
 *
 * Global, so that the verifier follows it once and not again for each frame.
 */
__noinline int stack_push_word(__u32 index)
{
	struct stack_slot *slot = bpf_map_lookup_elem(&stack_slots, &index);
	struct python_slot *python = bpf_map_lookup_elem(&python_slots, &index);
	__u64 group, done, end;

	if (!slot || !python)
		return STACK_NO_ROOM;
	group = python->group;
	end = python->words;
	barrier_var(group);
	if (group < python->groups && group < PYTHON_GROUPS)
		end = python->ends[group];
	done = python->done;
	barrier_var(done);
	if (done >= end || done >= PYTHON_FRAMES)
		return STACK_NO_MORE;
	if (!stack_push(slot, python->word[done], 0))
		return STACK_NO_ROOM;
	python->done = done + 1;
	return STACK_PUSHED;
}

/*
 * Add the group of Python's frames whose turn it is, behind the frame that was added
 * last if that is the loop's. Returns 0 if there is no room for it.
 */
__noinline int stack_push_group(__u32 index, __u32 paired)
{
	struct stack_slot *slot = bpf_map_lookup_elem(&stack_slots, &index);
	struct python_slot *python = bpf_map_lookup_elem(&python_slots, &index);
	int pushed = STACK_PUSHED;
	__u64 group;

	if (!slot || !python)
		return 0;
	/*
	 * Where in its function the loop calls depends on the instruction, and on how
	 * often that was executed. It does not make the stack another one.
	 */
	if (paired) {
		slot->walk.id = slot->walk.last_id;
		slot->walk.check = slot->walk.last_check;
		stack_hash_add(&slot->walk.id, &slot->walk.check, PYTHON_WORD);
	}
	for (int i = 0; i <= PYTHON_FRAMES && pushed == STACK_PUSHED; i++)
		pushed = stack_push_word(index);
	if (pushed == STACK_NO_ROOM)
		return 0;
	group = python->group + 1;
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

/*
 * Add the group of Python's frames whose loop the walk has just come through, if it has.
 * Returns 0 if there is no room for it.
 */
__noinline int stack_push_due(__u32 index)
{
	struct stack_slot *slot = bpf_map_lookup_elem(&stack_slots, &index);
	struct python_slot *python = bpf_map_lookup_elem(&python_slots, &index);
	struct stack_walk *walk;

	if (!slot || !python)
		return 0;
	walk = &slot->walk;
	/* What a signal has interrupted may be on another stack. */
	if (python->next_anchor && !walk->interrupted &&
	    python->next_anchor - walk->last_sp < walk->sp - walk->last_sp)
		return stack_push_group(index, 1);
	return 1;
}

/* Look for frames of Python first, which the walk is then to add where they belong. */
static __always_inline void stack_begin_python(__u32 index, struct stack_slot *slot)
{
	if (!python_begin(index, &slot->walk))
		return;
	for (int i = 0; i < PYTHON_STEPS; i++)
		if (!python_step(index))
			break;
	slot->walk.with_python = python_walked(index);
}

#endif /* MEMTOOLS_STACK_PYTHON_BPF_H */
