/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Kernel call stacks, in the same table as user stacks (stack.bpf.h).
 *
 * The kernel unwinds its own stacks, but only into memory that the program provides, and the id is
 * known only after that.
 */
#ifndef MEMTOOLS_KERNEL_STACK_BPF_H
#define MEMTOOLS_KERNEL_STACK_BPF_H

#include "stack_table.bpf.h"

/* Limit of the kernel's walk of its own stacks, unless kernel.perf_event_max_stack was changed. */
#define STACK_KERNEL_FRAMES 127
/* Bytes that are read of a kernel stack, with one frame more. They fit into a slot's window. */
#define STACK_KERNEL_BYTES 1024

/* Adds the frames that the kernel has written to the slot's window to the stack and its hashes. */
static __noinline int stack_take_kernel_frames(struct stack_slot *slot)
{
	const __u64 *frames = (const __u64 *)slot->window;
	__u32 i;

	for (i = 0; i < STACK_KERNEL_FRAMES && i < slot->stack.depth; i++) {
		struct stack *entry = slot->entries + i / STACK_ENTRY_FRAMES;

		if (i % STACK_ENTRY_FRAMES == 0)
			entry->interrupted = 0;
		entry->pc[i % STACK_ENTRY_FRAMES] = frames[i];
		stack_hash_add(&slot->walk.id, &slot->walk.check, frames[i]);
	}
	return 0;
}

/*
 * Stores the kernel stack in the slot, whose frames take `bytes` bytes, and returns its id.
 * `interrupted` is 1 if the first frame is no return address.
 */
static __always_inline __u64 stack_id_of_kernel(struct stack_slot *slot, __u64 bytes,
						__u64 interrupted)
{
	struct stack *stack = &slot->stack;
	__u32 depth = bytes / sizeof(__u64), most = stack_depth;

	stack->flags = STACK_KERNEL;
	stack->end = STACK_END_ROOT;
	stack->frame_pointer_steps = 0;
	if (most > STACK_KERNEL_FRAMES)
		most = STACK_KERNEL_FRAMES;
	if (depth >= most) {
		depth = most;
		stack->end = STACK_END_DEPTH;
		count_loss(deep_stacks);
	}
	stack->depth = depth;
	slot->walk.id = interrupted;
	slot->walk.check = 0;
	stack_take_kernel_frames(slot);
	stack->interrupted = interrupted;
	return stack_put(slot, slot->walk.id, slot->walk.check);
}

static __always_inline __u64 stack_of_kernel_from(void *ctx, __u64 interrupted)
{
	__u32 index = stack_slot_take();
	struct stack_slot *slot = bpf_map_lookup_elem(&stack_slots, &index);
	__u64 id = STACK_NONE;
	long bytes;

	if (!slot) {
		count_loss(busy_stacks);
		return STACK_LOST;
	}
	bytes = bpf_get_stack(ctx, slot->window, STACK_KERNEL_BYTES, 0);
	if (bytes > 0)
		id = stack_id_of_kernel(slot, bytes, interrupted);
	stack_slot_give_back(slot);
	return id;
}

/*
 * Returns the id of the kernel stack at the program's hook; `ctx` is the program's context.
 * STACK_NONE if the hook is not in kernel mode: a page fault of user code.
 */
static __always_inline __u64 stack_of_kernel(void *ctx)
{
	return stack_of_kernel_from(ctx, 0);
}

/*
 * Returns the kernel stack in a program of a perf event or a kprobe, which begins with the
 * interrupted instruction itself.
 */
static __always_inline __u64 stack_of_kernel_interrupted(void *ctx)
{
	return stack_of_kernel_from(ctx, 1);
}

#endif /* MEMTOOLS_KERNEL_STACK_BPF_H */
