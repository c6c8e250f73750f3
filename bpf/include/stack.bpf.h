/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * User call stacks: walking one, and the table of distinct ones, which gives each
 * an id. This is for uprobes; task_stack.bpf.h takes the user stack from programs
 * of any other type, and kernel_stack.bpf.h puts the kernel's into the same table.
 *
 * The table is our own rather than BPF_MAP_TYPE_STACK_TRACE. That map drops
 * or replaces a stack when two hash to the same bucket, and cannot grow a
 * second unwinder. Here the key is a 64-bit hash of the frames, and the entry
 * holds a second, independent one: only if both agree are two stacks the same.
 *
 * A user stack is walked without storing it, to get its two hashes; only a
 * stack that was never seen before is walked again, straight into its table
 * entry. So the walk needs no scratch memory. That matters in uprobes, whose programs
 * can be preempted and migrated: per-CPU scratch would be shared with whoever
 * runs next, and since 6.13 so is the BPF stack itself of any (sub)program
 * that uses 64 bytes of it or more (x86's private stacks). Every (sub)program
 * here stays below that; tests/e2e/load.rs checks it.
 */
#ifndef MEMTOOLS_STACK_BPF_H
#define MEMTOOLS_STACK_BPF_H

#include "memtools.bpf.h"

#define STACK_MAX_DEPTH 127

/* Frames kept of each stack, at most STACK_MAX_DEPTH. */
const volatile __u32 stack_depth = STACK_MAX_DEPTH;

/* Ids that are not in the table. */
#define STACK_LOST 0 /* could not be taken or stored; counted */
#define STACK_NONE 1 /* there is none: a kernel thread's user stack */
#define STACK_SOME 2 /* the first that is in it */

enum stack_flags {
	STACK_TRUNCATED = 1, /* there were more frames than stack_depth */
	STACK_KERNEL = 2,    /* addresses of the kernel */
};

struct stack {
	__u64 check; /* second hash of the frames; 0: being filled in */
	__u32 depth; /* frames in pc[] */
	__u32 flags; /* enum stack_flags */
	/*
	 * Bit i: pc[i] is the instruction that was interrupted. The others are
	 * return addresses, whose call lies before them.
	 */
	__u64 interrupted[2];
	__u64 pc[STACK_MAX_DEPTH];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64);
	__type(value, struct stack);
} stacks SEC(".maps");

const volatile struct stack empty_stack;

/* A frame record farther from the stack pointer than this is taken for a stray value. */
#define STACK_MAX_FRAME_BYTES (16 << 20)
#define NO_FRAME_POINTER      1 /* or any odd number */

/* What "push %rbp; mov %rsp,%rbp" leaves in memory at %rbp. */
struct frame_record {
	__u64 caller_fp;
	__u64 return_address;
};

struct stack_hash {
	__u64 id;
	__u64 check;
	__u32 depth;
	__u32 flags;
};

static __always_inline void stack_hash_add(struct stack_hash *hash, __u64 pc)
{
	hash->id = (hash->id ^ pc) * 0x9e3779b97f4a7c15ULL;
	hash->id ^= hash->id >> 29;
	hash->check = (hash->check + pc) * 0xd6e8feb86659fd93ULL;
	hash->check ^= hash->check >> 32;
}

/*
 * One frame: hash its program counter, and go on to its caller. Returns 0 if
 * there is none that can be found.
 *
 * The chain ends at a record that cannot be read, or that does not lead
 * towards the stack's base: a frame pointer that grows is what keeps a
 * register used for something else from being followed.
 *
 * A function of its own, because clang enters a loop with this body in its
 * middle, which 5.10's verifier takes for an endless one.
 */
static __noinline int stack_step(__u64 *pc, __u64 *fp, struct stack_hash *hash)
{
	struct frame_record record;

	stack_hash_add(hash, *pc);
	if (*fp & 7 || bpf_probe_read_user(&record, sizeof(record), (void *)*fp) ||
	    !record.return_address)
		return 0;
	*pc = record.return_address;
	/* Odd, as NO_FRAME_POINTER is, unless it is greater; a branch would double the paths. */
	*fp = record.caller_fp | (record.caller_fp - *fp - 1) >> 63;
	return 1;
}

/*
 * Walk the frame pointer chain that starts in `pc` and `fp`, leaf first. Hashes
 * the frames into `hash`, and stores them into `out` if it is not NULL.
 */
static __noinline int stack_walk(__u64 pc, __u64 fp, struct stack_hash *hash, struct stack *out)
{
	__u32 limit = stack_depth;

	for (__u32 i = 0; i < STACK_MAX_DEPTH && i < limit; i++) {
		hash->depth = i + 1;
		if (out)
			out->pc[i] = pc;
		if (!stack_step(&pc, &fp, hash))
			return 0;
	}
	hash->flags = STACK_TRUNCATED;
	return 0;
}

/*
 * Put a user stack that is not in the table yet into it. Returns 0 if it is full.
 * `interrupted` is 1 if `pc` is no return address.
 */
static __noinline int stack_store(__u64 pc, __u64 fp, __u64 id, __u64 interrupted)
{
	struct stack_hash hash = { .id = interrupted };
	struct stack *stack;

	/* Another thread may have met the same stack at the same time: both fill in the same. */
	bpf_map_update_elem(&stacks, &id, (const void *)&empty_stack, BPF_NOEXIST);
	stack = bpf_map_lookup_elem(&stacks, &id);
	if (!stack)
		return 0;
	stack_walk(pc, fp, &hash, stack);
	stack->depth = hash.depth;
	stack->flags = hash.flags;
	stack->interrupted[0] = interrupted;
	stack->check = hash.check | 1;
	return 1;
}

/*
 * Where the stack with these hashes is, or where it is to be stored: `*found`
 * tells which. Returns STACK_LOST if other stacks are in all the places for it.
 */
static __noinline __u64 stack_find(__u64 id, __u64 check, __u32 *found)
{
	if (id < STACK_SOME)
		id = STACK_SOME;
	/* Another stack with the same 64-bit id: the next id. */
	for (int probe = 0; probe < 4; probe++) {
		struct stack *stack = bpf_map_lookup_elem(&stacks, &id);

		*found = stack != NULL;
		if (!stack || !stack->check || stack->check == (check | 1))
			return id;
		id++;
	}
	return STACK_LOST;
}

/*
 * The id in the table of the user stack whose innermost frame is at `pc`, with
 * these stack and frame pointers. `interrupted` is 1 if the task was interrupted
 * at `pc`, 0 if it returns there.
 *
 * Global, so that the verifier follows it once and not again for each call.
 */
__noinline __u64 stack_id(__u64 pc, __u64 sp, __u64 fp, __u64 interrupted)
{
	struct stack_hash hash = { .id = interrupted };
	__u32 found = 0;
	__u64 id;

	/* Code without frame pointers keeps whatever it likes in the register. */
	if (fp < sp || fp - sp > STACK_MAX_FRAME_BYTES)
		fp = NO_FRAME_POINTER;
	stack_walk(pc, fp, &hash, NULL);
	if (hash.flags & STACK_TRUNCATED)
		count_loss(deep_stacks);
	id = stack_find(hash.id, hash.check, &found);
	if (id != STACK_LOST && (found || stack_store(pc, fp, id, interrupted)))
		return id;
	count_loss(stacks);
	return STACK_LOST;
}

/*
 * The stack of the caller of a function that has just returned. The program
 * counter is then the return address, so the caller is always there, even if
 * neither it nor the function keeps a frame pointer.
 */
static __always_inline __u64 stack_of_caller_at_return(struct pt_regs *ctx)
{
	return stack_id(PT_REGS_IP(ctx), PT_REGS_SP(ctx), PT_REGS_FP(ctx), 0);
}

/* The same at the function's entry, where the return address is on top of the stack. */
static __always_inline __u64 stack_of_caller_at_entry(struct pt_regs *ctx)
{
	__u64 return_address = 0;

	bpf_probe_read_user(&return_address, sizeof(return_address), (void *)PT_REGS_SP(ctx));
	return stack_id(return_address, PT_REGS_SP(ctx), PT_REGS_FP(ctx), 0);
}

#endif /* MEMTOOLS_STACK_BPF_H */
