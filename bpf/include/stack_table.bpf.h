/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Table of distinct call stacks, which gives each stack an id.
 *
 * The table is our own rather than BPF_MAP_TYPE_STACK_TRACE. That map drops or replaces a stack
 * when two hash to the same bucket, and takes stacks from the kernel's own walk only. Here the key
 * is a 64-bit hash of the frames, and the entry holds a second, independent hash: two stacks are
 * the same only if both hashes agree.
 *
 * An entry holds few frames, as most stacks need no more: tables of small entries are made faster.
 * A deeper stack has further entries for the rest of its frames, each of which the one before
 * refers to.
 *
 * The table starts small. Before it is full, user space replaces it by another one, has the stacks
 * that are still referred to copied to the new table, and forgets the rest (src/stacks/table.rs). A
 * program that meets a stack meanwhile stores it once more: the id is the same.
 *
 * A stack is put together in a slot: memory that belongs to its holder, however long the holder is
 * preempted, and whatever interrupts it. Per-CPU memory would be shared with both, as programs of
 * uprobes can be preempted and migrated. Since 6.13 the BPF stack is shared, too, of any
 * (sub)program that uses more than 48 bytes of it (private stacks: 64 bytes and more, after the
 * kernel has rounded up to 16). No (sub)program here does; tests/e2e/load.rs checks it.
 */
#ifndef MEMTOOLS_STACK_TABLE_BPF_H
#define MEMTOOLS_STACK_TABLE_BPF_H

#include "arch_order.bpf.h"
#include "fill_level.bpf.h"

enum stack_layout {
	STACK_ENTRY_FRAMES = 64, /* frames of one entry: a power of two */
	STACK_ENTRIES = 4,	 /* entries of the deepest stack */
	STACK_MAX_DEPTH = 255,	 /* frames of all entries */
};
#define STACK_WINDOW_BYTES 2048

/* Slots, a power of two. src/stacks/slots.rs says how many. */
const volatile __u32 stack_slot_count = 1;

/* Frames kept of each stack, at most STACK_MAX_DEPTH. */
const volatile __u32 stack_depth = STACK_MAX_DEPTH;

/* Reserved ids, which are not in the table, and the first id of a stored stack. */
enum stack_id {
	STACK_LOST, /* the stack could not be taken or stored; counted */
	STACK_NONE, /* there is no stack: a kernel thread's user stack */
	STACK_SOME, /* the first id in the table */
};

enum stack_flags {
	STACK_KERNEL = 1, /* addresses of the kernel */
};

/* Reason why a stack has no further frame. */
enum stack_end {
	STACK_END_ROOT,		 /* the last frame is the outermost */
	STACK_END_DEPTH,	 /* the stack has more than stack_depth frames */
	STACK_END_FRAME_POINTER, /* no further frame pointer; no tables were requested */
	STACK_END_NO_TABLES,	 /* no further frame pointer; no tables for the process */
	STACK_END_NO_RULE,	 /* no unwind information for the code of the last frame */
	STACK_END_NO_CODE,	 /* the next address is in no known code of the process */
	STACK_END_UNREADABLE,	 /* the stack's memory could not be read */
	STACK_END_BACKWARDS,	 /* the next frame is farther from the stack's base */
	STACK_END_IN_JAVA_HEAP,	 /* the next frame is in Java's heap (virtual thread) */
	STACK_ENDS,
};

struct stack {
	__u64 check; /* second hash of the frames */
	__u64 rest;  /* id of the entry with the next frames; STACK_LOST: none */
	/*
	 * Bit i: pc[i] is an interrupted instruction. Without the bit, pc[i] is a return address,
	 * whose call lies before it.
	 */
	__u64 interrupted;
	__u32 depth; /* frames, including those in the next entries */
	__u16 frame_pointer_steps;
	__u8 flags; /* enum stack_flags */
	__u8 end;   /* enum stack_end */
	__u64 pc[STACK_ENTRY_FRAMES];
};

/* First table. Sizes of keys and values alone, as of `overflow` in memleak/live.bpf.h. */
struct stack_map {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1); /* size() of src/stacks/table.rs says how many */
	__uint(key_size, sizeof(__u64));
	__uint(value_size, sizeof(struct stack));
} stacks SEC(".maps");

/* Table in use; `stacks` is in use while this map is empty. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct stack_map);
} stack_maps SEC(".maps");

/* Walk up a user stack, and the frame that it has reached. */
struct stack_walk {
	__u64 pc;
	__u64 sp;
	__u64 fp;
	__u64 pc_at;   /* place of the pc on the stack, as return probes note it; 0: a register */
	__u64 process; /* number from unwind_space(); 0: walk by frame pointers only */
	__u64 word;    /* word that stack_word() has read */
	/* Part of the stack that was read, in one piece. */
	__u64 window_at;
	__u32 window_places; /* offsets at which eight bytes can be read; 0: nothing was read */
	__u32 interrupted;   /* 1: pc is no return address */
	__u64 id;	     /* two hashes of the frames so far */
	__u64 check;
	/* Values of id, check and sp before the last step. */
	__u64 last_id;
	__u64 last_check;
	__u64 last_sp;
	/* Values of id, check and depth where the walk first came to generated code. */
	__u64 generated_id;
	__u64 generated_check;
	__u32 generated_depth; /* 0: nowhere yet */
	__u32 with_python;     /* 1: frames of Python are to be added */
	__u32 index;	       /* number of the slot of this walk */
	__u32 interpreter;     /* met in the walk: UNWIND_PYTHON, UNWIND_HOTSPOT */
	__u64 layout;	       /* `layout` of unwind_space() */
	/* On architectures whose calls leave the return address in a register (arch_step.bpf.h): */
	__u64 link;	  /* return address of the innermost frame, in that register; 0: unknown */
	__u64 sp_is_lost; /* 1: sp is not that of the frame, only below it */
};

/* Slots that a thread tries to take; src/stacks/slots.rs simulates it. */
#define STACK_PROBES 16

struct stack_slot {
	__u64 holders; /* 1: held; more: others try to take it, and will step back */
	/* User stacks that were put together in this slot, by enum stack_end. */
	__u64 ends[STACK_ENDS];
	__u64 frame_pointer_steps; /* of stacks that are not walked by frame pointers alone */
	struct stack_walk walk;
	union {
		struct stack stack;
		struct stack entries[STACK_ENTRIES]; /* the stack, and the rest of its frames */
	};
	__u8 window[STACK_WINDOW_BYTES];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* src/stacks/slots.rs sets the number */
	__type(key, __u32);
	__type(value, struct stack_slot);
} stack_slots SEC(".maps");

/*
 * Takes a slot. What the last holder has stored in the slot is visible to the new one, and nothing
 * of the last holder's is stored later, as both additions to `holders` keep the order. The same
 * holds for the results with the slot's number in other maps (mappings, unwind_places,
 * python_slots).
 *
 * Returns the slot's number; stack_slot_count if the thread finds none. Threads with
 * successive ids begin with different slots, and an odd step leads each of them to others. Global,
 * so that the verifier follows the function once and not for each caller.
 */
__noinline __u32 stack_slot_take(void)
{
	__u32 thread = (__u32)bpf_get_current_pid_tgid(), index = thread;

	for (__u32 probe = 0; probe < STACK_PROBES; probe++) {
		struct stack_slot *slot;

		index &= stack_slot_count - 1;
		slot = bpf_map_lookup_elem(&stack_slots, &index);
		if (!slot)
			break;
		/*
		 * 5.10 has no atomic operation that returns the old value. Of threads that add at
		 * the same time, one that reads 1 is alone; all others step back.
		 */
		order_add(&slot->holders, 1);
		if (*(volatile __u64 *)&slot->holders == 1) {
			slot->walk.index = index;
			return index;
		}
		order_add(&slot->holders, -1);
		index += thread / stack_slot_count * 2 + 1;
	}
	return stack_slot_count;
}

static __always_inline void stack_slot_give_back(struct stack_slot *slot)
{
	order_add(&slot->holders, -1);
}

static __always_inline void stack_hash_add(__u64 *id, __u64 *check, __u64 pc)
{
	*id = (*id ^ pc) * 0x9e3779b97f4a7c15ULL;
	*id ^= *id >> 29;
	*check = (*check + pc) * 0xd6e8feb86659fd93ULL;
	*check ^= *check >> 32;
}

/* Returns the table that user space has put instead of `stacks`, or NULL. */
static __always_inline void *stack_map(void)
{
	__u32 first = 0;

	return bpf_map_lookup_elem(&stack_maps, &first);
}

/*
 * Returns the entry with this id. Two calls, each with one kind of map: otherwise the verifier
 * cannot make them direct calls.
 */
static __always_inline struct stack *stack_entry(void *map, __u64 *id)
{
	if (map)
		return bpf_map_lookup_elem(map, id);
	barrier();
	return bpf_map_lookup_elem(&stacks, id);
}

/*
 * Returns the id at which the stack with these hashes is stored, or is to be stored: `*found` says
 * which. Returns STACK_LOST if other stacks have all ids for it.
 */
static __noinline __u64 stack_find(void *map, __u64 id, __u64 check, __u32 *found)
{
	if (id < STACK_SOME)
		id = STACK_SOME;
	/* If another stack has the same 64-bit id, the next id is tried. */
	for (int probe = 0; probe < 2; probe++) {
		struct stack *stack = stack_entry(map, &id);

		*found = stack != NULL;
		if (!stack || stack->check == check)
			return id;
		id++;
	}
	return STACK_LOST;
}

/* Stores a new stack. Returns 0 if the table is full. */
static __always_inline int stack_store(void *map, struct stack *stack, __u64 id)
{
	if (bpf_map_update_elem(map ?: &stacks, &id, stack, BPF_ANY))
		return 0;
	count_table_entry(TABLE_STACKS);
	return 1;
}

/*
 * Stores the entry with this number of a new stack with these hashes, if the stack is that deep.
 * The entry before it then refers to it, or to STACK_LOST if it cannot be stored.
 */
static __noinline int stack_put_entry(void *map, struct stack_slot *slot, __u32 number, __u64 hash)
{
	__u64 id = hash, check = slot->stack.check;
	__u32 frames = number * STACK_ENTRY_FRAMES, found = 0;
	struct stack *entry;

	if (!number || number >= STACK_ENTRIES)
		return 0;
	entry = &slot->entries[number];
	entry[-1].rest = STACK_LOST;
	if (slot->stack.depth <= frames)
		return 0;
	stack_hash_add(&id, &check, frames);
	entry->check = check;
	entry->depth = slot->stack.depth - frames;
	entry->flags = slot->stack.flags;
	entry->end = slot->stack.end;
	id = stack_find(map, id, check, &found);
	if (id != STACK_LOST && !found && !stack_store(map, entry, id))
		id = STACK_LOST;
	entry[-1].rest = id;
	return 0;
}

/*
 * Stores the frames of a new stack that do not fit into its own entry. The last entry comes first:
 * whoever finds an entry finds all that it refers to.
 */
static __noinline int stack_put_rest(void *map, struct stack_slot *slot, __u64 hash)
{
	slot->entries[STACK_ENTRIES - 1].rest = STACK_LOST;
	for (__u32 number = STACK_ENTRIES - 1; number > 0; number--)
		stack_put_entry(map, slot, number, hash);
	return 0;
}

/*
 * Returns the id of the stack in the slot, with these hashes. A new stack is stored, with all of
 * its entries in the same table.
 */
static __noinline __u64 stack_put(struct stack_slot *slot, __u64 id, __u64 check)
{
	void *map = stack_map();
	__u32 found = 0;

	slot->stack.check = check;
	slot->stack.rest = STACK_LOST;
	id = stack_find(map, id, check, &found);
	if (id != STACK_LOST && !found && slot->stack.depth > STACK_ENTRY_FRAMES)
		stack_put_rest(map, slot, id);
	/* Another thread may have met the same stack at the same time: both store the same. */
	if (id != STACK_LOST && !found && !stack_store(map, &slot->stack, id))
		id = STACK_LOST;
	if (id == STACK_LOST)
		count_loss(stacks);
	return id;
}

#endif /* MEMTOOLS_STACK_TABLE_BPF_H */
