/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Adds the frames of Python functions to a walk, behind the frame of the interpreter's loop that
 * executes them.
 */
#ifndef MEMTOOLS_STACK_PYTHON_BPF_H
#define MEMTOOLS_STACK_PYTHON_BPF_H

#include "python.bpf.h"
#include "stack_walk.bpf.h"

enum stack_due {
	STACK_NONE_DUE,
	STACK_PUSHED,
	STACK_NO_ROOM, /* the stack is full */
};

/* Makes the words of the next group due: the walk has just passed the loop of that group. */
static __always_inline void stack_next_group(struct stack_walk *walk, struct python_slot *python)
{
	__u64 group = python->group, due = python->words;

	/*
	 * The place in the loop's function from which it calls depends on the instruction, and on
	 * how often that was executed. The hash of the stack must not depend on it.
	 */
	walk->id = walk->last_id;
	walk->check = walk->last_check;
	stack_hash_add(&walk->id, &walk->check, PYTHON_WORD);
	/* A loop has one group. */
	walk->last_sp = walk->sp;
	barrier_var(group);
	if (group < python->groups && group < PYTHON_GROUPS)
		due = python->ends[group];
	python->due = due;
	group++;
	python->group = group;
	python->next_anchor = 0;
	barrier_var(group);
	if (group < python->groups && group < PYTHON_GROUPS)
		python->next_anchor = python->anchors[group];
}

/*
 * Adds a Python frame, if one is due. Returns enum stack_due.
 *
 * Global, so that the verifier follows the function once and not again for each frame.
 */
__noinline int stack_push_due(__u32 index)
{
	struct stack_slot *slot = bpf_map_lookup_elem(&stack_slots, &index);
	struct python_slot *python = bpf_map_lookup_elem(&python_slots, &index);
	struct stack_walk *walk;
	__u64 done;

	if (!slot || !python)
		return STACK_NONE_DUE;
	walk = &slot->walk;
	/* A frame that a signal has interrupted may be on another stack. */
	if (python->done >= python->due && python->next_anchor && !walk->interrupted &&
	    python->next_anchor - walk->last_sp < walk->sp - walk->last_sp)
		stack_next_group(walk, python);
	done = python->done;
	if (done >= python->due)
		return STACK_NONE_DUE;
	barrier_var(done);
	if (done >= PYTHON_FRAMES)
		return STACK_NONE_DUE;
	if (!stack_push(slot, python->word[done], 0))
		return STACK_NO_ROOM;
	python->done = done + 1;
	return STACK_PUSHED;
}

/* Adds a round of the frames that are due. Returns 0 if none are left, or if the stack is full. */
__noinline int stack_push_round(__u32 index)
{
	CALL_LOOP (long i = 0; i < PYTHON_ROUND_STEPS; i++)
		if (stack_push_due(index) != STACK_PUSHED)
			return 0;
	return 1;
}

/* Adds a mark and the Python frames whose loops are not among the native frames. */
__noinline int stack_push_unpaired(__u32 index)
{
	struct stack_slot *slot = bpf_map_lookup_elem(&stack_slots, &index);
	struct python_slot *python = bpf_map_lookup_elem(&python_slots, &index);

	if (!slot || !python)
		return 0;
	if (python->done < python->words) {
		if (!stack_push(slot, PYTHON_WORD | PYTHON_UNPAIRED, 0))
			return 0;
		python->next_anchor = 0;
		python->due = python->words;
		CALL_LOOP (long i = 0; i < PYTHON_ROUNDS; i++)
			if (!stack_push_round(index))
				break;
	}
	if (python->cut)
		stack_push(slot, PYTHON_WORD | PYTHON_CUT, 0);
	return 0;
}

/* Walks the Python frames first, for the native walk to add them where they belong. */
static __always_inline void stack_begin_python(__u32 index, struct stack_slot *slot)
{
	if (!python_begin(index, &slot->walk))
		return;
	CALL_LOOP (long i = 0; i < PYTHON_ROUNDS; i++)
		if (!python_round(index))
			break;
	slot->walk.with_python = python_walked(index);
}

#endif /* MEMTOOLS_STACK_PYTHON_BPF_H */
