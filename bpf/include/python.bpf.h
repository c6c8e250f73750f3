/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Walk through the frames of CPython, and their place in a user stack.
 *
 * Before the native walk, the thread's chain of interpreter frames is followed, and a word is noted
 * for each frame (python_word.bpf.h). The words form groups: one for each call of the interpreter's
 * loop. Each group has an anchor, an address in the C frame of that call: of a local variable of
 * the loop's function. The native walk adds a group behind the frame that contains the group's
 * anchor. No symbol is needed.
 *
 * Memory of the process may hold anything: a chain is followed for a limited number of steps, and
 * an object is treated as a code object only if its type says so.
 */
#ifndef MEMTOOLS_PYTHON_BPF_H
#define MEMTOOLS_PYTHON_BPF_H

#include "python_word.bpf.h"
#include "arch_thread.bpf.h"

/*
 * Reads the frame at `address` into the window, with the part of its page that precedes it: frames
 * of a thread lie together, callers below. Nothing behind the frame is read, as the next page may
 * not be mapped.
 */
static __noinline int python_fill(struct python_slot *slot, __u64 address)
{
	__u64 page = address & -4096ULL, end = address + slot->process.frame_bytes;
	__u64 from = end - PYTHON_WINDOW_BYTES, bytes;

	if (from < page)
		from = page;
	if (end > page + 4096)
		from = address;
	bytes = end - from;
	barrier_var(bytes);
	slot->window_bytes = 0;
	if (bytes > PYTHON_WINDOW_BYTES)
		return 0;
	slot->window_at = from;
	if (bpf_probe_read_user(slot->window, bytes, (void *)from))
		return 0;
	slot->window_bytes = bytes;
	return 1;
}

/* Ends a group, whose anchor this is. Returns 0 if there are too many groups. */
static __always_inline int python_end_group(struct python_slot *slot, __u64 anchor)
{
	__u64 group = slot->groups;

	barrier_var(group);
	if (group >= PYTHON_GROUPS)
		return 0;
	slot->anchors[group] = anchor;
	slot->ends[group] = slot->words;
	slot->groups = group + 1;
	return 1;
}

/*
 * Ends a group whose anchor is the current _PyCFrame, and goes on to the _PyCFrame of the caller.
 */
static __noinline int python_end_cframe(struct python_slot *slot)
{
	int room = python_end_group(slot, slot->cframe);

	slot->cframe = python_pointer(slot->cframe + slot->process.cframe_previous);
	return room;
}

/*
 * Whether the frame is an entry frame, which executes nothing and begins a call of the loop. A
 * frame near the stack pointer is on the C stack: it is read into `near`, so that the window is
 * kept.
 */
static __noinline int python_is_entry(struct python_slot *slot)
{
	__u64 mark = slot->process.frame_mark;

	if (slot->process.chain != PYTHON_ENTRY_FRAMES ||
	    slot->frame - slot->sp >= PYTHON_MAX_ENTRY_DISTANCE)
		return 0;
	if (bpf_probe_read_user(slot->near, PYTHON_ENTRY_FRAME_BYTES, (void *)slot->frame))
		return 0;
	barrier_var(mark);
	return mark < PYTHON_STATE_BYTES && slot->near[mark] == slot->process.mark;
}

/* Notes the word of a frame. Returns 0 if `code` is not a code object. */
static __always_inline int python_note(struct python_slot *slot, __u64 code, __u64 instruction)
{
	__u64 count = slot->words, word;

	barrier_var(count);
	/* There is no space for the word, but the walk goes on, to the anchor of its group. */
	if (count >= PYTHON_FRAMES) {
		slot->cut = 1;
		return 1;
	}
	word = python_word(slot, code);
	if (!word)
		return 0;
	if (slot->process.code_bytecode)
		instruction = (instruction - code - slot->process.code_bytecode) >> 1;
	/* Without lines, words have no instruction: a function has the same word wherever it is. */
	if (python_lines)
		word |= instruction & PYTHON_NOT_BEGUN;
	slot->word[count] = word;
	slot->words = count + 1;
	return 1;
}

static __always_inline int python_give_up(struct python_slot *slot)
{
	slot->cut = 1;
	return 0;
}

/*
 * Walks one frame. Returns 0 at the end of the chain.
 *
 * Global, so that the verifier follows the function once and not again for each frame.
 */
__noinline int python_step(__u32 index)
{
	struct python_slot *slot = bpf_map_lookup_elem(&python_slots, &index);
	__u64 frame, at, code, instruction;
	__u8 mark;

	if (!slot)
		return 0;
	frame = slot->frame;
	if (!frame)
		return 0;
	at = frame - slot->window_at;
	if (at > PYTHON_WINDOW_BYTES || at + slot->process.frame_bytes > slot->window_bytes) {
		if (python_is_entry(slot)) {
			slot->frame = python_scratch_word(slot, slot->process.frame_previous);
			return python_end_group(slot, frame);
		}
		if (!python_fill(slot, frame))
			return python_give_up(slot);
		at = frame - slot->window_at;
	}
	mark = python_field(slot, at, slot->process.frame_mark);
	slot->frame = python_field(slot, at, slot->process.frame_previous);
	if (slot->process.chain == PYTHON_ENTRY_FRAMES && mark == slot->process.mark)
		return python_end_group(slot, frame);
	code = python_field(slot, at, slot->process.frame_code) & ~7ULL;
	instruction = python_field(slot, at, slot->process.frame_instruction);
	if (!python_note(slot, code, instruction)) {
		/*
		 * From 3.15 on a chain ends in a frame of the thread state, which executes
		 * nothing. In some threads it does not have the mark.
		 */
		if (!slot->frame && slot->process.chain == PYTHON_ENTRY_FRAMES)
			return 0;
		return python_give_up(slot);
	}
	if (slot->process.chain == PYTHON_SINGLE_FRAMES ||
	    (slot->process.chain == PYTHON_MARKED_FRAMES && mark == slot->process.mark))
		return python_end_cframe(slot);
	return 1;
}

/*
 * Walks a round of frames. Returns 0 at the end of the chain.
 *
 * The verifier follows each iteration of a loop: with rounds, 48 iterations for 512 frames.
 */
__noinline int python_round(__u32 index)
{
	CALL_LOOP (long i = 0; i < PYTHON_ROUND_STEPS; i++)
		if (!python_step(index))
			return 0;
	return 1;
}

/* Finds the thread's state by a key, if the process has created the key by now. */
static __noinline int python_find_state(struct python_process *process)
{
	__u64 key;

	if (!process->key_at)
		return 0;
	/* int created; unsigned int key; */
	key = python_pointer(process->key_at);
	if ((__u32)key != 1 || key >> 32 >= PYTHON_KEYS)
		return 0;
	process->state_at = PTHREAD_FIRST_KEY + 16 * (key >> 32);
	return 1;
}

/*
 * Goes to the innermost frame of the thread. Returns 0 if there is none, or if memory cannot be
 * read just now, which cuts the stack: the kernel may be moving the page, to make a huge one.
 */
static __noinline int python_first_frame(struct python_slot *slot)
{
	__u64 thread = thread_pointer(), at = thread + slot->process.state_at, pointer;

	if (bpf_probe_read_user(&pointer, sizeof(pointer), (void *)at))
		return python_give_up(slot);
	if (slot->process.value && pointer) {
		at = pointer + 8 * (slot->process.value - 1);
		if (bpf_probe_read_user(&pointer, sizeof(pointer), (void *)at))
			return python_give_up(slot);
	}
	/* A thread that has not run Python has no state. */
	if (!pointer)
		return 0;
	if (bpf_probe_read_user(slot->near, sizeof(slot->near), (void *)pointer))
		return python_give_up(slot);
	if (python_scratch_word(slot, slot->process.thread) != thread)
		return 0;
	if (slot->process.cframe)
		slot->cframe = python_scratch_word(slot, slot->process.cframe);
	if (slot->process.frame) {
		slot->frame = python_scratch_word(slot, slot->process.frame);
		return 1;
	}
	if (bpf_probe_read_user(&pointer, sizeof(pointer),
				(void *)(slot->cframe + slot->process.cframe_frame)))
		return python_give_up(slot);
	slot->frame = pointer;
	return 1;
}

/* Begins a walk through the thread's frames. Returns 0 if there is nothing to walk. */
static __noinline int python_begin(__u32 index, struct stack_walk *walk)
{
	struct python_slot *slot = bpf_map_lookup_elem(&python_slots, &index);
	struct python_process *process = bpf_map_lookup_elem(&python_processes, &walk->layout);

	if (!slot || !process || (!process->state_at && !python_find_state(process)))
		return 0;
	slot->process = *process;
	slot->identity = python_identity();
	slot->sp = walk->sp;
	slot->frame = 0;
	slot->next_anchor = 0;
	slot->window_bytes = 0;
	slot->words = 0;
	slot->groups = 0;
	slot->group = 0;
	slot->due = 0;
	slot->done = 0;
	slot->cut = 0;
	return python_first_frame(slot) || slot->cut;
}

/* Ends the walk. Words of a group whose beginning was not reached have no anchor. */
static __noinline int python_walked(__u32 index)
{
	struct python_slot *slot = bpf_map_lookup_elem(&python_slots, &index);

	if (!slot)
		return 0;
	if (slot->frame)
		slot->cut = 1;
	if (slot->groups)
		slot->next_anchor = slot->anchors[0];
	return 1;
}

/*
 * Asks user space to look for the interpreter of the current process, unless it was asked just now.
 */
static __noinline int python_request(struct stack_walk *walk)
{
	if (!walk->layout || bpf_map_lookup_elem(&python_processes, &walk->layout))
		return 0;
	return unwind_request_interpreter(walk->layout, walk->layout, UNWIND_SUBJECT_PYTHON);
}

#endif /* MEMTOOLS_PYTHON_BPF_H */
