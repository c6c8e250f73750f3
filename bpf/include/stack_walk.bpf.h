/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Walk of the user stack: how it begins, the frames that it adds, and the memory that it reads.
 *
 * The stack's memory is read in pieces of 2 KiB, or up to the end of the page. Such a read takes
 * 1.6 times as long as one of eight bytes, and serves a dozen frames.
 */
#ifndef MEMTOOLS_STACK_WALK_BPF_H
#define MEMTOOLS_STACK_WALK_BPF_H

#include "stack_table.bpf.h"
#include "held.bpf.h"
#include "unwind.bpf.h"

#define STACK_PAGE_BYTES 4096ULL

/*
 * Reads the stack around `address` into the window of the walk in this slot. Returns 0 if it cannot
 * be read. Global, so that the verifier follows the function once and not for each word that is
 * read.
 *
 * A page can be read as a whole or not at all, so the window does not cross into another page: the
 * first thread's stack ends, above main() and the environment, with its page, and a read beyond is
 * a page fault, which takes 800 ns.
 */
__noinline int stack_fill(__u32 index, __u64 address)
{
	struct stack_slot *slot = bpf_map_lookup_elem(&stack_slots, &index);
	__u64 page = address & -STACK_PAGE_BYTES, from = address - 128, bytes;
	struct stack_walk *walk;

	if (!slot)
		return 0;
	walk = &slot->walk;
	/* Memory below the stack pointer is of frames that have been walked. */
	if (from < walk->sp || from > address)
		from = walk->sp > address ? address : walk->sp;
	if (from < page)
		from = page;
	bytes = page + STACK_PAGE_BYTES - from;
	/*
	 * Without the barrier clang compares another value, of which 5.10's verifier learns
	 * nothing.
	 */
	barrier_var(bytes);
	if (bytes > STACK_WINDOW_BYTES)
		bytes = STACK_WINDOW_BYTES;
	walk->window_at = from;
	walk->window_places = 0;
	if (bytes < 8 || bpf_probe_read_user(slot->window, bytes, (void *)from))
		return 0;
	walk->window_places = bytes - 7;
	return 1;
}

/* Reads a word of the stack into walk.word. Returns 0 if it cannot be read. */
static __always_inline int stack_word(struct stack_slot *slot, __u64 address)
{
	struct stack_walk *walk = &slot->walk;
	__u64 offset = address - walk->window_at;

	if (offset >= walk->window_places) {
		if (!stack_fill(walk->index, address))
			return 0;
		offset = address - walk->window_at;
		/* The word crosses into another page, as no word of a stack does. */
		if (offset >= walk->window_places)
			return 0;
	}
	barrier_var(offset);
	if (offset > STACK_WINDOW_BYTES - 8)
		return 0;
	walk->word = *(__u64 *)(slot->window + offset);
	return 1;
}

/* Ends the walk, for this reason. */
static __always_inline int stack_end(struct stack_slot *slot, __u8 end)
{
	slot->stack.end = end;
	return 0;
}

/* Ends the walk as no rule leads to the caller, and counts that for the file. */
static __always_inline int stack_without_rule(struct stack_slot *slot, __u64 row)
{
	unwind_count_missing(row_file(row));
	return stack_end(slot, STACK_END_NO_RULE);
}

/* Adds a frame. Returns 0 if the stack is full. */
static __noinline int stack_push(struct stack_slot *slot, __u64 pc, __u64 interrupted)
{
	struct stack_walk *walk = &slot->walk;
	struct stack *entry = slot->entries;
	__u64 depth = slot->stack.depth;

	if (depth >= stack_depth)
		return stack_end(slot, STACK_END_DEPTH);
	barrier_var(depth);
	if (depth >= STACK_MAX_DEPTH)
		return stack_end(slot, STACK_END_DEPTH);
	entry += depth / STACK_ENTRY_FRAMES;
	entry->pc[depth % STACK_ENTRY_FRAMES] = pc;
	if (interrupted)
		entry->interrupted |= 1ULL << depth % STACK_ENTRY_FRAMES;
	slot->stack.depth = depth + 1;
	stack_hash_add(&walk->id, &walk->check, pc + interrupted);
	return 1;
}

/* Adds the frame that the walk has reached. */
static __always_inline int stack_push_walked(struct stack_slot *slot)
{
	return stack_push(slot, slot->walk.pc, slot->walk.interrupted);
}

/*
 * Begins a walk.
 *
 * Global, so that the verifier follows the function once: the check that `mm` may be read takes 4
 * ms.
 */
__noinline int stack_begin(__u32 index, __u64 pc, __u64 sp, __u64 fp, __u64 interrupted)
{
	struct stack_slot *slot = bpf_map_lookup_elem(&stack_slots, &index);
	struct stack_walk *walk;
	struct stack *stack;

	if (!slot)
		return 0;
	walk = &slot->walk;
	stack = &slot->stack;
	walk->pc = pc;
	walk->sp = sp;
	walk->fp = fp;
	walk->pc_at = 0;
	walk->layout = 0;
	walk->process = unwind_mode == UNWIND_MODE_FP ? 0 : unwind_space(&walk->layout);
	walk->interpreter = 0;
	walk->window_places = 0;
	walk->interrupted = interrupted;
	walk->id = 0;
	walk->check = 0;
	walk->generated_depth = 0;
	walk->with_python = 0;
	walk->last_sp = sp;
	stack->depth = 0;
	stack->flags = 0;
	stack->end = STACK_END_NO_CODE;
	stack->frame_pointer_steps = 0;
	for (int i = 0; i < STACK_ENTRIES; i++)
		slot->entries[i].interrupted = 0;
	return 0;
}

#endif /* MEMTOOLS_STACK_WALK_BPF_H */
