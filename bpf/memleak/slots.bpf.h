/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Slots of the pools of CPython's allocator, pymalloc. Compilers copy it into the functions that
 * allocate objects, so each copy is probed where it changes the pool's count of used slots.
 * pymalloc.rs in src/code finds these places, and has the layout of a pool's header.
 */
#ifndef MEMTOOLS_MEMLEAK_SLOTS_BPF_H
#define MEMTOOLS_MEMLEAK_SLOTS_BPF_H

#include "arch_probe.bpf.h"
#include "calls.bpf.h"

/*
 * Returns the slot that a copy moves: from a register, or the first of the pool's free slots.
 * Returns 0 if there is no pool.
 */
static __noinline __u64 slot_at(struct pt_regs *ctx, __u32 signature)
{
	__u64 pool = register_with(ctx, field(signature, SIGNATURE_POOL)), slot = 0;

	barrier_var(pool);
	/* Code that only looks like pymalloc has no pool. */
	if (pool % POOL_BYTES)
		return 0;
	if (field(signature, SIGNATURE_SLOT_HELD))
		slot = register_with(ctx, field(signature, SIGNATURE_SLOT));
	else if (bpf_probe_read_user(&slot, sizeof(slot), (void *)(pool + POOL_FREE_BLOCK)))
		count_loss(calls);
	barrier_var(slot);
	return slot > pool && slot < pool + POOL_BYTES ? slot : 0;
}

/* Records a slot that the current thread takes. */
static __always_inline int record_slot(struct pt_regs *ctx, __u64 slot, bool use_table)
{
	struct thread *thread = thread_of_current();

	if (!thread || nested(ctx, thread, stack_pointer(ctx)) || !take_slot(thread, slot))
		return 0;
	if (trace_calls)
		emit(EVENT_ALLOC_EXIT, slot, thread->size, 0);
	block_allocated(slot, thread, stack_of_function(ctx), use_table);
	return 0;
}

/*
 * Both are functions of their own for the stack, of which a program on a uprobe has 48 bytes.
 * Kernels without cookies refuse the instructions of the table.
 */
static __noinline int slot_taken_to_table(struct pt_regs *ctx, __u64 slot)
{
	return record_slot(ctx, slot, true);
}

static __noinline int slot_taken_to_hash(struct pt_regs *ctx, __u64 slot)
{
	return record_slot(ctx, slot, false);
}

/* Handles a copy of pymalloc, which takes a slot or gives one back. */
static __always_inline void move_slot(struct pt_regs *ctx, __u32 signature, bool use_table)
{
	struct live_block block = {};
	__u64 slot;

	count_hit();
	if (!call_is_wanted(ctx, signature))
		return;
	slot = slot_at(ctx, signature);
	if (!slot)
		return;
	if (field(signature, SIGNATURE_KIND) == FUNCTION_TAKE_SLOT) {
		if (use_table)
			slot_taken_to_table(ctx, slot);
		else
			slot_taken_to_hash(ctx, slot);
	} else if (!release_live(slot, &block, use_table) && records_all()) {
		freed_unknown(ctx, slot, block.born, true);
	}
}

#endif /* MEMTOOLS_MEMLEAK_SLOTS_BPF_H */
