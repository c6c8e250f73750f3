/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Calls of functions that allocate, free and map, from entry to return.
 */
#ifndef MEMTOOLS_MEMLEAK_CALLS_BPF_H
#define MEMTOOLS_MEMLEAK_CALLS_BPF_H

#include "copies.bpf.h"
#include "events.bpf.h"
#include "sampling.bpf.h"
#include "totals.bpf.h"

/*
 * Returns the bytes that calloc or reallocarray is requested. These functions fail where the
 * product overflows; it is saturated here.
 */
static __always_inline __u64 product(__u64 count, __u64 size)
{
	__u64 limit = count ? ~0ULL / count : ~0ULL;

	/* Without the barrier clang makes a 128-bit multiplication, which BPF does not have. */
	barrier_var(limit);
	return size > limit ? ~0ULL : count * size;
}

static __always_inline __u32 field(__u64 signature, __u32 shift)
{
	return signature >> shift & 15;
}

/*
 * Returns the argument with this number. Registers are read at constant offsets, as the verifier
 * demands.
 */
static __noinline __u64 argument_with(struct pt_regs *ctx, __u32 number)
{
	__u64 value = 0;

	if (number == 1)
		value = PT_REGS_PARM1(ctx);
	barrier_var(value);
	if (number == 2)
		value = PT_REGS_PARM2(ctx);
	barrier_var(value);
	if (number == 3)
		value = PT_REGS_PARM3(ctx);
	barrier_var(value);
	if (number == 4)
		value = PT_REGS_PARM4(ctx);
	barrier_var(value);
	if (number == 5)
		value = PT_REGS_PARM5(ctx);
	barrier_var(value);
	if (number == 6)
		value = PT_REGS_PARM6(ctx);
	return value;
}

/* Returns the argument that a signature names by this shift; 0 if the function has none. */
static __always_inline __u64 argument(struct pt_regs *ctx, __u64 signature, __u32 shift)
{
	__u32 number = field(signature, shift);

	return number ? argument_with(ctx, number) : 0;
}

/* Updates the sums for a block that is not live any more. */
static __always_inline void account_free(const struct live_block *block)
{
	if (keep_totals)
		total_subtract(block->stack, block->size);
	if (churn_ns && bpf_ktime_get_ns() - (block->born & BORN_TIME) < churn_ns)
		total_add(block->stack, block->size);
}

static __always_inline void block_allocated(__u64 address, struct thread *thread, __u64 stack,
					    bool use_table)
{
	__u64 born, size = thread->size;
	struct live_block *unfreed = &thread->held; /* `held` is not needed any more */

	if (only_totals) {
		total_add(stack, size);
		return;
	}
	if (live_take(&thread->pid, address, unfreed, use_table)) {
		__sync_fetch_and_add(&frees.replaced, 1);
		if (keep_totals)
			total_subtract(unfreed->stack, unfreed->size);
	}
	born = bpf_ktime_get_ns() | (__u64)thread->level << BORN_TIME_BITS;
	if (live_put(&thread->pid, address, size, stack, born, use_table) && keep_totals)
		total_add(stack, size);
}

/*
 * Whether a call that had this stack pointer at its entry is still going on, although its return is
 * not seen. Its return address is then on the stack, or a return probe has replaced it. Both can be
 * true long after the call: if the caller puts its next frames below (alloca). So the stack is
 * walked up to that address.
 */
static __always_inline int call_in_progress(struct pt_regs *ctx, __u64 call_sp, __u64 returns_to)
{
	__u64 sp = stack_pointer(ctx);

	if (!stack_keeps_return_address(call_sp, returns_to) &&
	    stack_original_return_address(call_sp) != returns_to)
		return 0;
	return stack_comes_from(stack_return_address(ctx), stack_pointer_after_return(sp),
				PT_REGS_FP(ctx), call_sp, returns_to);
}

/*
 * Whether a call was made by the allocator itself, such as the mmap of a large malloc: its stack
 * pointer is below that of the outer call. If it is not below, the record was left behind by a call
 * that never returned (longjmp).
 */
static __always_inline bool nested(struct pt_regs *ctx, struct thread *thread, __u64 sp)
{
	if (!thread || sp >= thread->sp)
		return false;
	return !skips_returns || !thread->returns_to ||
	       call_in_progress(ctx, thread->sp, thread->returns_to);
}

static __noinline struct thread *thread_of_current(void)
{
	__u64 id = bpf_get_current_pid_tgid();
	struct thread *thread = value_of(&threads, &id, (const void *)&no_thread);

	if (!thread) {
		count_loss(calls);
		unseen_call_ns = bpf_ktime_get_ns();
	}
	return thread;
}

/*
 * Begins a call of a function that allocates or maps, in the current thread. Returns the thread's
 * record, or NULL if the call is not to be followed to its return.
 */
static __noinline struct thread *begin(struct pt_regs *ctx, __u32 signature)
{
	struct thread *thread = thread_of_current();
	__u64 sp = stack_pointer(ctx);

	if (!thread || nested(ctx, thread, sp))
		return NULL;
	thread->sp = sp;
	thread->size = argument(ctx, signature, SIGNATURE_SIZE);
	if (field(signature, SIGNATURE_COUNT))
		thread->size = product(argument(ctx, signature, SIGNATURE_COUNT), thread->size);
	thread->address = argument(ctx, signature, SIGNATURE_ADDRESS);
	thread->result = argument(ctx, signature, SIGNATURE_RESULT);
	thread->kind = field(signature, SIGNATURE_KIND);
	thread->level = current_level();
	/* The size of a pool's slot is known when the pool is there. */
	thread->recorded = thread->kind != FUNCTION_UNMAP && thread->kind != FUNCTION_NEW_POOL &&
			   wanted(thread->size, thread->level);
	thread->pid = thread->recorded || thread->address ? process_of_current() : 0;
	thread->replaces = 0;
	thread->returns_to = 0;
	if (thread->recorded)
		__sync_fetch_and_add(&hits_of_cpu()->recorded, 1);
	if (trace_calls && thread->recorded)
		emit(EVENT_ALLOC_ENTER, 0, thread->size, 0);
	return thread;
}

static __noinline int begin_mapping(struct pt_regs *ctx, struct thread *thread)
{
	__u64 flags = PT_REGS_PARM4(ctx);

	if (thread->kind == FUNCTION_MAP) {
		thread->replaces = !!(flags & MAP_FIXED);
		return 0;
	}
	/* mremap(old, 0, ...) and MREMAP_DONTUNMAP keep the old mapping. */
	if (!PT_REGS_PARM2(ctx) || (thread->kind == FUNCTION_REMAP && flags & MREMAP_DONTUNMAP))
		return 0;
	thread->replaces = 1;
	return emit(EVENT_UNMAP, thread->address, PT_REGS_PARM2(ctx), 0);
}

static __noinline int mapped(struct pt_regs *ctx, struct thread *thread)
{
	__u64 address = PT_REGS_RC(ctx);

	if (address == ~0ULL) { /* MAP_FAILED; the -1 of munmap */
		if (thread->kind != FUNCTION_MAP && thread->replaces)
			emit(EVENT_UNMAP_FAILED, 0, 0, 0);
		return 0;
	}
	if (thread->recorded)
		emit_sampled(EVENT_MAP, address, thread->size, stack_of_caller_at_return(ctx),
			     thread->level);
	else if (thread->kind == FUNCTION_REMAP ||
		 (thread->kind == FUNCTION_MAP && thread->replaces))
		emit(EVENT_MAP_IGNORED, address, thread->size, 0);
	return 0;
}

/* Returns the address that an allocation function has returned; 0 if it failed. */
static __always_inline __u64 result_of(struct pt_regs *ctx, const struct thread *thread)
{
	__u64 address = PT_REGS_RC(ctx);

	if (!thread->result)
		return address;
	if ((__u32)address) /* an errno */
		return 0;
	bpf_probe_read_user(&address, sizeof(address), (void *)thread->result);
	return address;
}

static __always_inline void allocated(struct pt_regs *ctx, struct thread *thread, bool use_table)
{
	__u64 address = result_of(ctx, thread);

	if (trace_calls && thread->recorded)
		emit(EVENT_ALLOC_EXIT, address, thread->size, 0);
	if (thread->replaces) {
		/* realloc(p, 0) frees p and may return NULL; otherwise NULL leaves it alone. */
		if (address || !thread->size)
			account_free(&thread->held);
		else
			live_put(&thread->pid, thread->address, thread->held.size,
				 thread->held.stack, thread->held.born, use_table);
	}
	if (address && thread->recorded)
		block_allocated(address, thread, stack_of_caller_at_return(ctx), use_table);
}

/* Fills the record of a thread for a slot that it takes. Returns 1 if the options request the slot.
 */
static __noinline int take_slot(struct thread *thread, __u64 slot)
{
	__u64 pool = slot & ~(POOL_BYTES - 1);
	__u32 size_class = 0;

	thread->recorded = 0;
	thread->replaces = 0;
	thread->result = 0;
	if (bpf_probe_read_user(&size_class, sizeof(size_class), (void *)(pool + POOL_SIZE_CLASS)))
		count_loss(calls);
	else if (size_class < SIZE_CLASSES) {
		thread->size = (size_class + 1) * SLOT_STEP;
		thread->level = current_level();
		thread->recorded = wanted(thread->size, thread->level);
	}
	if (!thread->recorded)
		return 0;
	thread->pid = process_of_current();
	__sync_fetch_and_add(&hits_of_cpu()->recorded, 1);
	if (trace_calls)
		emit(EVENT_ALLOC_ENTER, 0, thread->size, 0);
	return 1;
}

/*
 * Whether the allocator called its own free. When a thread ends, glibc frees once
 * more what the thread has freed into its cache, from tcache_thread_shutdown(),
 * which is within a few hundred bytes of free.
 */
static __noinline int called_by_allocator(struct pt_regs *ctx)
{
	__u64 ip = PT_REGS_IP(ctx);

	barrier_var(ip);
	return stack_return_address(ctx) - ip + BESIDE_FREE < 2 * BESIDE_FREE;
}

/*
 * Whether the options leave nothing out. Otherwise a free of a block that is not live means
 * nothing.
 */
static __always_inline bool records_all(void)
{
	return sample_rate <= 1 && !sample_bytes && !level_bytes && !min_size && max_size == ~0ULL;
}

/*
 * Whether a function that frees was called by another one, which is counted already:
 * libc_malloc_debug's free() calls glibc's.
 */
static __always_inline int within_free(struct pt_regs *ctx, struct thread *thread)
{
	__u64 sp = stack_pointer(ctx), ip = PT_REGS_IP(ctx), outer_sp = thread->freeing_sp;

	barrier_var(ip);
	if (!outer_sp || sp > outer_sp)
		return 0;
	if (sp < outer_sp)
		return call_in_progress(ctx, outer_sp, thread->freeing_returns_to);
	/*
	 * The outer function has jumped here as its last call, if the return address is the same.
	 */
	return ip != thread->freeing_ip && stack_return_address(ctx) == thread->freeing_returns_to;
}

/* Notes a call of a function that frees and may call another one. */
static __noinline int begin_freeing(struct pt_regs *ctx)
{
	struct thread *thread = thread_of_current();
	__u64 sp = stack_pointer(ctx);

	if (!thread || within_free(ctx, thread))
		return 0;
	thread->freeing_sp = sp;
	thread->freeing_ip = PT_REGS_IP(ctx);
	thread->freeing_returns_to = stack_return_address(ctx);
	return 0;
}

/*
 * Whether a free is the allocator's own, or was called by an outer one that is counted already. A
 * function of its own, as the verifier allows eight frames.
 */
static __noinline int nested_free(struct pt_regs *ctx)
{
	struct thread *thread = thread_of_current();

	return !thread || nested(ctx, thread, stack_pointer(ctx)) || within_free(ctx, thread) ||
	       called_by_allocator(ctx);
}

/* Returns the stack of a free: of the caller of a function that frees, or of the function that a
 * probe is in. */
static __always_inline __u64 stack_of_free(struct pt_regs *ctx, bool in_function)
{
	return in_function ? stack_of_function(ctx) : stack_of_caller_at_entry(ctx);
}

/*
 * Whether a block that was allocated at `born_ns` and freed can have been allocated again by a call
 * that was not seen. With by_name, calls of threads that have other names are not seen.
 */
static __always_inline bool may_be_allocated_again(__u64 born_ns)
{
	__u32 key = STEERING_UNSEEN_UNTIL;
	__u64 *until_ns = bpf_map_lookup_elem(&steering, &key);

	return filter.by_name || born_ns < unseen_call_ns || !until_ns || born_ns < *until_ns;
}

/*
 * Handles a free of a block that is not live. `born`: when a block that was freed at this address
 * had been allocated; 0: unknown.
 */
static __noinline int freed_unknown(struct pt_regs *ctx, __u64 address, __u64 born,
				    bool in_function)
{
	if (!born || may_be_allocated_again(born & BORN_TIME)) {
		__sync_fetch_and_add(&frees.unknown, 1);
		return count_unknown_frees ? unknown_free_by(stack_of_free(ctx, in_function)) : 0;
	}
	__sync_fetch_and_add(&frees.twice, 1);
	return emit(EVENT_FREED_TWICE, address, 0, stack_of_free(ctx, in_function));
}

/* Takes the live block at this address away. Returns false if there is none. */
static __always_inline bool release_live(__u64 address, struct live_block *block, bool use_table)
{
	if (!live_take(NULL, address, block, use_table))
		return false;
	account_free(block);
	if (trace_calls)
		emit(EVENT_FREE_ENTER, address, block->size, 0);
	return true;
}

static __always_inline void release(struct pt_regs *ctx, __u32 signature, bool use_table)
{
	__u64 address = argument(ctx, signature, SIGNATURE_ADDRESS);
	struct live_block block = {};

	if (!address)
		return;
	if (!release_live(address, &block, use_table) && records_all() && !nested_free(ctx))
		freed_unknown(ctx, address, block.born, false);
	if (records_all() && field(signature, SIGNATURE_WRAPS))
		begin_freeing(ctx);
}

/*
 * Skips the return of a call of which nothing will be recorded: half of the cost of such a call is
 * its return. Returns 1 if the return is skipped.
 */
static __noinline int skip_return(struct pt_regs *ctx, struct thread *thread)
{
	if (!skips_returns || thread->kind != FUNCTION_ALLOCATE || thread->recorded ||
	    thread->replaces)
		return 0;
	thread->returns_to = stack_return_address(ctx);
	return thread->returns_to != 0;
}

/*
 * Whether the options match the task that makes a call. Whichever task it is, it is stopped if the
 * call is about to replace code. A function of its own for `ids`, for which a program on a uprobe
 * has no stack: it has 48 bytes in all.
 */
static __noinline int call_is_wanted(struct pt_regs *ctx, __u32 signature)
{
	__u32 kind = field(signature, SIGNATURE_KIND);
	struct task_ids ids;

	if (kind == FUNCTION_MAP || kind == FUNCTION_UNMAP || kind == FUNCTION_REMAP)
		copies_watch(ctx, kind);
	return filter_wants(&ids);
}

/* Handles the entry of a probed function. Returns 1 if the function's return is to be seen. */
static __always_inline int enter(struct pt_regs *ctx, __u32 signature, bool use_table)
{
	struct thread *thread;

	count_hit();
	if (!call_is_wanted(ctx, signature))
		return 0;
	if (field(signature, SIGNATURE_KIND) == FUNCTION_FREE) {
		release(ctx, signature, use_table);
		return 0;
	}
	thread = begin(ctx, signature);
	if (!thread)
		return 0;
	if (thread->kind == FUNCTION_NEW_POOL)
		return 1;
	if (thread->kind != FUNCTION_ALLOCATE)
		begin_mapping(ctx, thread);
	/*
	 * realloc frees the old block before it returns, and another thread may be given its
	 * address at once. So the block is taken out of the live blocks at the entry, and put back
	 * if realloc fails.
	 */
	else if (thread->address && !only_totals)
		thread->replaces =
		    live_take(&thread->pid, thread->address, &thread->held, use_table);
	return !skip_return(ctx, thread);
}

static __always_inline int leave(struct pt_regs *ctx, bool use_table)
{
	__u64 id = bpf_get_current_pid_tgid();
	struct thread *thread = bpf_map_lookup_elem(&threads, &id);

	count_hit();
	/* The return has popped the return address that was on top of the stack at entry. */
	if (!thread || stack_pointer(ctx) != stack_pointer_after_return(thread->sp))
		return 0;
	thread->sp = 0;
	if (thread->kind == FUNCTION_NEW_POOL && PT_REGS_RC(ctx))
		take_slot(thread, PT_REGS_RC(ctx));
	if (thread->kind == FUNCTION_ALLOCATE || thread->kind == FUNCTION_NEW_POOL)
		allocated(ctx, thread, use_table);
	else
		mapped(ctx, thread);
	return 0;
}

#endif /* MEMTOOLS_MEMLEAK_CALLS_BPF_H */
