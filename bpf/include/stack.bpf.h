/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * User call stacks. This is for uprobes; task_stack.bpf.h takes the user stack
 * from programs of any other type, and kernel_stack.bpf.h puts the kernel's into
 * the same table.
 *
 * Most code is built without frame pointers. Its callers are found by the rules
 * of unwind.bpf.h; where there are none (generated code, a file that user space
 * has not looked at yet, no room for a file's), by frame pointers. An address that is in no code of
 * the process ends the walk: it is not taken for a frame.
 *
 * The stack's memory is read in pieces of 2 KiB, or up to the end of the page:
 * that takes 1.6 times as long as eight bytes do, and serves a dozen frames.
 */
#ifndef MEMTOOLS_STACK_BPF_H
#define MEMTOOLS_STACK_BPF_H

#include "stack_table.bpf.h"
#include "held.bpf.h"
#include "python.bpf.h"
#include "unwind.bpf.h"

/* A frame record farther from the stack pointer than this is taken for a stray value. */
#define STACK_MAX_FRAME_BYTES (16 << 20)
#define NO_FRAME_POINTER      1 /* or any odd number */
#define STACK_PAGE_BYTES      4096ULL

/* Steps of a walk: a frame may take a second one, for a return probe. */
#define STACK_MAX_STEPS (STACK_MAX_DEPTH + 33)

/* Return probes that a thread can be in at once; the kernel allows 64. */
#define RETURN_PROBES 64

/* What is on the stack of a signal handler, above its return address: struct ucontext. */
#define SIGNAL_FP 120
#define SIGNAL_SP 160
#define SIGNAL_PC 168

/*
 * Read the stack around `address` into the window. Returns 0 if it cannot be read.
 *
 * All of a page can be read or nothing, so the window does not cross into another
 * one: the first thread's stack ends, above main() and the environment, with its
 * page, and a read of more is a page fault, which takes 800 ns.
 */
static __noinline int stack_fill(struct stack_slot *slot, __u64 address)
{
	struct stack_walk *walk = &slot->walk;
	__u64 page = address & -STACK_PAGE_BYTES, from = address - 128, bytes;

	/* What is below is of frames that have been walked. */
	if (from < walk->sp || from > address)
		from = walk->sp > address ? address : walk->sp;
	if (from < page)
		from = page;
	bytes = page + STACK_PAGE_BYTES - from;
	/* Else clang compares something else, of which 5.10's verifier learns nothing. */
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

/* Read a word of the stack into walk.word. Returns 0 if it cannot be read. */
static __always_inline int stack_word(struct stack_slot *slot, __u64 address)
{
	struct stack_walk *walk = &slot->walk;
	__u64 offset = address - walk->window_at;

	if (offset >= walk->window_places) {
		if (!stack_fill(slot, address))
			return 0;
		offset = address - walk->window_at;
		/* It crosses into another page, as no word of a stack does. */
		if (offset >= walk->window_places)
			return 0;
	}
	barrier_var(offset);
	if (offset > STACK_WINDOW_BYTES - 8)
		return 0;
	walk->word = *(__u64 *)(slot->window + offset);
	return 1;
}

/* The walk is over. */
static __always_inline int stack_end(struct stack_slot *slot, __u8 end)
{
	slot->stack.end = end;
	return 0;
}

/*
 * Where the return address that was at `address` would return to: a pending
 * return probe (uretprobe) has put its own there. 0 if there is none.
 */
__noinline __u64 stack_of_return_probes(__u64 address)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct return_instance *instance = BPF_CORE_READ(task, utask, return_instances);

	for (int i = 0; i < RETURN_PROBES && instance; i++) {
		if (BPF_CORE_READ(instance, stack) == address)
			return BPF_CORE_READ(instance, orig_ret_vaddr);
		instance = BPF_CORE_READ(instance, next);
	}
	return 0;
}

/* Add a frame. Returns 0 if there is no room for it. */
static __noinline int stack_push(struct stack_slot *slot, __u64 pc, __u64 interrupted)
{
	struct stack_walk *walk = &slot->walk;
	struct stack *stack = &slot->stack;
	__u64 depth = stack->depth;

	if (depth >= stack_depth)
		return stack_end(slot, STACK_END_DEPTH);
	barrier_var(depth);
	if (depth >= STACK_MAX_DEPTH)
		return stack_end(slot, STACK_END_DEPTH);
	stack->pc[depth] = pc;
	if (interrupted)
		stack->interrupted[depth >> 6 & 1] |= 1ULL << (depth & 63);
	stack->depth = depth + 1;
	stack_hash_add(&walk->id, &walk->check, pc + interrupted);
	return 1;
}

/* Add the frame that the walk has come to. */
static __always_inline int stack_push_walked(struct stack_slot *slot)
{
	return stack_push(slot, slot->walk.pc, slot->walk.interrupted);
}

/* No rule tells where the caller is. */
static __noinline int stack_without_rule(struct stack_slot *slot, __u64 row)
{
	unwind_count_missing(row >> 32);
	return stack_end(slot, STACK_END_NO_RULE);
}

/* To the caller, by what "push %rbp; mov %rsp,%rbp" leaves in memory at %rbp. */
static __noinline int stack_by_frame_pointer(struct stack_slot *slot, __u64 row)
{
	struct stack_walk *walk = &slot->walk;
	__u64 fp = walk->fp, sp = walk->sp, caller_fp;

	/* As the ABI has it of the outermost frame; but where there are rules, it is any number. */
	if (!fp && walk->process && (row & 0xf) == UNWIND_NO_RULE)
		return stack_end(slot, STACK_END_ROOT);
	if (!walk->process && unwind_mode == UNWIND_MODE_DWARF)
		goto none;
	if (fp & 7 || fp < sp || fp - sp > STACK_MAX_FRAME_BYTES)
		goto none;
	if (!stack_word(slot, fp))
		goto none;
	caller_fp = walk->word;
	if (!stack_word(slot, fp + 8) || !walk->word)
		goto none;
	if (walk->process && row == UNWIND_NO_RULE && !walk->generated_depth) {
		walk->generated_id = walk->id;
		walk->generated_check = walk->check;
		walk->generated_depth = slot->stack.depth;
	}
	walk->pc = walk->word;
	walk->pc_at = fp + 8;
	walk->sp = fp + 16;
	walk->fp = caller_fp;
	walk->interrupted = 0;
	slot->stack.frame_pointer_steps++;
	return 1;
none:
	if (!walk->process)
		return stack_end(slot, unwind_mode == UNWIND_MODE_FP ? STACK_END_FRAME_POINTER
								     : STACK_END_NO_TABLES);
	return stack_without_rule(slot, row);
}

/* To what a signal has interrupted. */
static __noinline int stack_by_signal(struct stack_slot *slot)
{
	struct stack_walk *walk = &slot->walk;
	__u64 sp = walk->sp;

	if (!stack_word(slot, sp + SIGNAL_FP))
		return stack_end(slot, STACK_END_UNREADABLE);
	walk->fp = walk->word;
	if (!stack_word(slot, sp + SIGNAL_PC))
		return stack_end(slot, STACK_END_UNREADABLE);
	walk->pc = walk->word;
	if (!stack_word(slot, sp + SIGNAL_SP))
		return stack_end(slot, STACK_END_UNREADABLE);
	/* It can be another stack than the handler's (sigaltstack). */
	walk->sp = walk->word;
	walk->pc_at = 0;
	walk->interrupted = 1;
	return 1;
}

/* The CFA that a rule gives; 0: none. */
static __always_inline __u64 stack_cfa(struct stack_slot *slot, __u64 row)
{
	struct stack_walk *walk = &slot->walk;
	__u64 kind = row & 0xf, base = walk->sp;
	long offset = (long)(row << 32) >> 48;

	if (kind == UNWIND_BY_SP)
		return base + offset * 8;
	if (kind == UNWIND_PLT)
		return base + 8 + ((long)(walk->pc & 15) >= offset ? 8 : 0);
	if (kind == UNWIND_BY_FP || kind == UNWIND_THROUGH_FP) {
		base = walk->fp;
		if (base & 7)
			return 0;
	}
	if (kind == UNWIND_BY_FP)
		return base + offset * 8;
	if (!stack_word(slot, base + (offset >> 8) * 8))
		return 0;
	return walk->word + ((long)(row << 40) >> 56) * 8;
}

/* To the caller, by a rule. Returns 0 if there is none. */
static __noinline int stack_by_rule(struct stack_slot *slot, __u64 row)
{
	struct stack_walk *walk = &slot->walk;
	__u64 cfa = stack_cfa(slot, row), fp = walk->fp;
	__u64 fp_rule = row >> 4 & 0xf, fp_at;

	if (!cfa)
		return stack_end(slot, STACK_END_UNREADABLE);
	if (cfa <= walk->sp || cfa & 7)
		return stack_end(slot, STACK_END_BACKWARDS);
	if (fp_rule == UNWIND_FP_AT_CFA || fp_rule == UNWIND_FP_AT_FP) {
		fp_at = (fp_rule == UNWIND_FP_AT_CFA ? cfa : fp) + ((long)(row << 48) >> 56) * 8;
		if (!stack_word(slot, fp_at))
			return stack_end(slot, STACK_END_UNREADABLE);
		fp = walk->word;
	} else if (fp_rule == UNWIND_FP_FORGOTTEN) {
		fp = NO_FRAME_POINTER;
	}
	if (!stack_word(slot, cfa - 8))
		return stack_end(slot, STACK_END_UNREADABLE);
	walk->pc = walk->word;
	walk->pc_at = cfa - 8;
	walk->sp = cfa;
	walk->fp = fp;
	walk->interrupted = 0;
	return walk->pc ? 1 : stack_end(slot, STACK_END_ROOT);
}

/* Whether a return probe has put the return address there that the walk has come to. */
static __noinline int stack_return_probed(struct stack_slot *slot)
{
	struct stack_walk *walk = &slot->walk;
	__u64 returns_to = walk->pc_at ? stack_of_return_probes(walk->pc_at) : 0;

	if (!returns_to)
		return 0;
	walk->pc = returns_to;
	walk->pc_at = 0;
	return 1;
}

/* The walk has come to where no code is. Returns 0 if that is its end. */
static __always_inline int stack_out_of_code(struct stack_slot *slot)
{
	struct stack_walk *walk = &slot->walk;

	if (stack_return_probed(slot))
		return 1;
	/* A register's is code, whatever we know. */
	if (!walk->pc_at && !stack_push_walked(slot))
		return 0;
	return stack_end(slot, STACK_END_NO_CODE);
}

/*
 * The walk has come through generated code to HotSpot: so that was HotSpot's, and its
 * frame pointers have skipped callers. Cut the stack where they were first followed.
 */
static __noinline int stack_cut_generated(struct stack_slot *slot)
{
	struct stack_walk *walk = &slot->walk;

	walk->id = walk->generated_id;
	walk->check = walk->generated_check;
	slot->stack.depth = walk->generated_depth;
	return stack_without_rule(slot, UNWIND_NO_RULE);
}

/*
 * One step: add the frame, and go on to its caller. Returns 0 at the end.
 *
 * Global, so that the verifier follows it once and not again for each frame.
 */
__noinline int stack_step(__u32 index)
{
	struct stack_slot *slot = bpf_map_lookup_elem(&stack_slots, &index);
	struct stack_walk *walk;
	__u64 row = UNWIND_NO_RULE, kind;

	if (!slot)
		return 0;
	walk = &slot->walk;
	if (walk->process) {
		row = unwind_row(walk->process, walk->pc << 1 | walk->interrupted, index);
		if ((row & 0xf) == UNWIND_NO_CODE)
			return stack_out_of_code(slot);
		/* The page of the return probes is of no file, as generated code is. */
		if (row == UNWIND_NO_RULE && stack_return_probed(slot))
			return 1;
		if (walk->generated_depth && row >> 32 & UNWIND_HOTSPOT)
			return stack_cut_generated(slot);
		walk->interpreter |= row >> 32 & UNWIND_PYTHON;
	}
	kind = row & 0xf;
	/* It begins there: it is not what is before. */
	if (kind == UNWIND_FIBER_END)
		walk->interrupted = 1;
	if (!stack_push_walked(slot))
		return 0;
	/* Here and not where it is found: programs may be eight calls deep. */
	if (kind == UNWIND_NO_TABLE)
		unwind_ask(index);
	/* The frame pointer of such code is any number: from here on it may skip frames. */
	if (kind == UNWIND_NO_ROOM || kind == UNWIND_NO_TABLE)
		walk->process = 0;
	if (kind == UNWIND_NO_RULE || !walk->process)
		return stack_by_frame_pointer(slot, row);
	if (kind == UNWIND_STRANGE)
		return stack_without_rule(slot, row);
	if (kind == UNWIND_ROOT || kind == UNWIND_FIBER_END)
		return stack_end(slot, STACK_END_ROOT);
	if (kind == UNWIND_SIGNAL)
		return stack_by_signal(slot);
	return stack_by_rule(slot, row);
}

/* Begin a walk. */
static __noinline int stack_begin(struct stack_slot *slot, __u64 pc, __u64 sp, __u64 fp,
				  __u64 interrupted)
{
	struct stack_walk *walk = &slot->walk;
	struct stack *stack = &slot->stack;

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
	stack->depth = 0;
	stack->flags = 0;
	stack->end = STACK_END_NO_CODE;
	stack->frame_pointer_steps = 0;
	stack->interrupted[0] = 0;
	stack->interrupted[1] = 0;
	return 0;
}

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

/* Count the walk, and store the stack. Returns its id. */
static __noinline __u64 stack_finish(struct stack_slot *slot)
{
	struct stack_walk *walk = &slot->walk;
	__u64 end = slot->stack.end;

	if (end == STACK_END_DEPTH)
		count_loss(deep_stacks);
	barrier_var(end);
	if (end < STACK_ENDS)
		slot->ends[end]++;
	if (walk->process)
		slot->frame_pointer_steps += slot->stack.frame_pointer_steps;
	/* Of two that differ in it only, one was walked before its tables were there. */
	stack_hash_add(&walk->id, &walk->check, end);
	return stack_put(&slot->stack, walk->id, walk->check);
}

/*
 * The id in the table of the user stack whose innermost frame is at `pc`, with
 * these stack and frame pointers. `interrupted` is 1 if the task was interrupted
 * at `pc`, 0 if it returns there.
 */
__noinline __u64 stack_id(__u64 pc, __u64 sp, __u64 fp, __u64 interrupted)
{
	__u32 index = stack_slot_take();
	struct stack_slot *slot = bpf_map_lookup_elem(&stack_slots, &index);
	__u64 id;

	if (!slot) {
		count_loss(stacks);
		return STACK_LOST;
	}
	stack_begin(slot, pc, sp, fp, interrupted);
	if (interpreters && python_met && python_begin(index, &slot->walk)) {
		for (int i = 0; i < PYTHON_STEPS; i++)
			if (!python_step(index))
				break;
		stack_walk_with_python(index, slot);
	} else {
		for (int i = 0; i < STACK_MAX_STEPS; i++)
			if (!stack_step(index))
				break;
	}
	if (interpreters && slot->walk.interpreter)
		python_ask(&slot->walk);
	id = stack_finish(slot);
	stack_slot_give_back(slot);
	return id;
}

/*
 * Whether the call whose return address is at `address` is among the callers of
 * the frame that stack_id() would begin with. 1 also where nobody can tell: if the
 * walk ends before, or went by frame pointers, which skip frames.
 */
__noinline int stack_comes_from(__u64 pc, __u64 sp, __u64 fp, __u64 address)
{
	__u32 index = stack_slot_take();
	struct stack_slot *slot = bpf_map_lookup_elem(&stack_slots, &index);
	int comes = 1;

	if (!slot)
		return 1;
	stack_begin(slot, pc, sp, fp, 0);
	for (int i = 0; i < STACK_MAX_STEPS && slot->walk.pc_at != address; i++) {
		if (slot->walk.sp > address) {
			comes = slot->stack.frame_pointer_steps != 0;
			break;
		}
		if (!stack_step(index)) {
			comes = slot->stack.end != STACK_END_ROOT;
			break;
		}
	}
	stack_slot_give_back(slot);
	return comes;
}

/* At a function's entry, where it returns to: the top of the stack. 0 if that is not readable. */
static __always_inline __u64 stack_return_address(struct pt_regs *ctx)
{
	__u64 return_address = 0, sp = PT_REGS_SP(ctx);

	bpf_probe_read_user(&return_address, sizeof(return_address), (void *)sp);
	return return_address;
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

/* The same at the function's entry. */
static __always_inline __u64 stack_of_caller_at_entry(struct pt_regs *ctx)
{
	return stack_id(stack_return_address(ctx), PT_REGS_SP(ctx) + sizeof(long), PT_REGS_FP(ctx),
			0);
}

#endif /* MEMTOOLS_STACK_BPF_H */
