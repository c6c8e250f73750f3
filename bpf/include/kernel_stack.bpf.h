/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Kernel call stacks, in the same table as the user's (stack.bpf.h).
 *
 * The kernel unwinds its own code itself, but only into memory of ours, and the
 * id is known only after that.
 */
#ifndef MEMTOOLS_KERNEL_STACK_BPF_H
#define MEMTOOLS_KERNEL_STACK_BPF_H

#include "stack.bpf.h"

/*
 * Memory for kernel stacks while they are taken: whoever holds a slot has it to
 * itself, however long it is preempted, and whatever interrupts it. Not per-CPU
 * memory, which is shared with both.
 */
#define STACK_SLOTS 256

struct stack_slot {
	__u64 holders; /* 1: held; more: others who tried, and will go away */
	struct stack stack;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, STACK_SLOTS);
	__type(key, __u32);
	__type(value, struct stack_slot);
} stack_slots SEC(".maps");

/* The thread's own slot, or one beside it. NULL if all these are held. */
static __noinline struct stack_slot *stack_slot_take(void)
{
	__u32 thread = (__u32)bpf_get_current_pid_tgid();

	for (__u32 probe = 0; probe < 4; probe++) {
		__u32 index = (thread + probe) % STACK_SLOTS;
		struct stack_slot *slot = bpf_map_lookup_elem(&stack_slots, &index);

		if (!slot)
			return NULL;
		/*
		 * 5.10 has no atomic that returns the old value. Of those who add
		 * at the same time, who reads 1 is alone; the rest step back.
		 */
		__sync_fetch_and_add(&slot->holders, 1);
		if (*(volatile __u64 *)&slot->holders == 1)
			return slot;
		__sync_fetch_and_add(&slot->holders, -1);
	}
	return NULL;
}

static __noinline int stack_hash_all(const struct stack *stack, struct stack_hash *hash)
{
	__u32 i;

	for (i = 0; i < STACK_MAX_DEPTH && i < stack->depth; i++)
		stack_hash_add(hash, stack->pc[i]);
	return 0;
}

/*
 * The id of the kernel stack in `stack`, whose frames take `bytes` of it.
 * `interrupted` is 1 if the first is no return address.
 */
static __always_inline __u64 stack_id_of_kernel(struct stack *stack, __u64 bytes, __u64 interrupted)
{
	__u32 depth = bytes / sizeof(stack->pc[0]);
	struct stack_hash hash = { .id = interrupted };
	__u32 found = 0;
	__u64 id;

	stack->flags = STACK_KERNEL;
	stack->interrupted[0] = interrupted;
	if (depth >= stack_depth) {
		depth = stack_depth;
		stack->flags |= STACK_TRUNCATED;
		count_loss(deep_stacks);
	}
	stack->depth = depth;
	stack_hash_all(stack, &hash);
	stack->check = hash.check | 1;
	id = stack_find(hash.id, hash.check, &found);
	if (id != STACK_LOST && !found && bpf_map_update_elem(&stacks, &id, stack, BPF_ANY))
		id = STACK_LOST;
	if (id == STACK_LOST)
		count_loss(stacks);
	return id;
}

static __always_inline __u64 stack_of_kernel_from(void *ctx, __u64 interrupted)
{
	struct stack_slot *slot = stack_slot_take();
	__u64 id = STACK_NONE;
	long bytes;

	if (!slot) {
		count_loss(stacks);
		return STACK_LOST;
	}
	bytes = bpf_get_stack(ctx, slot->stack.pc, sizeof(slot->stack.pc), 0);
	if (bytes > 0)
		id = stack_id_of_kernel(&slot->stack, bytes, interrupted);
	__sync_fetch_and_add(&slot->holders, -1);
	return id;
}

/*
 * The kernel stack of what the program is attached to; `ctx` is the program's
 * context. STACK_NONE if that is not in kernel mode: a page fault of user code.
 */
static __always_inline __u64 stack_of_kernel(void *ctx)
{
	return stack_of_kernel_from(ctx, 0);
}

/* The same in a program of a perf event or a kprobe: it begins with the instruction itself. */
static __always_inline __u64 stack_of_kernel_interrupted(void *ctx)
{
	return stack_of_kernel_from(ctx, 1);
}

#endif /* MEMTOOLS_KERNEL_STACK_BPF_H */
