/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * How HotSpot's generated code is unwound, which keeps no frame pointers.
 *
 * The code is in a few heaps. A heap has a map, with a byte for each segment of it,
 * that leads from any address to the block that it is in. A block begins with a header
 * and the description of its code (CodeBlob), which has the size of the code's frame.
 * So a compiled function's caller is found by its frame's size; that of the interpreter
 * and of stubs, which have no size, by frame pointer.
 *
 * User space (src/interpreters/hotspot) tells where a process has its heaps, and at
 * which offsets all this is, as the virtual machine itself has it for debuggers. All
 * that is read of a process may be anything: it makes one row, as unwind.bpf.h has them.
 */
#ifndef MEMTOOLS_HOTSPOT_BPF_H
#define MEMTOOLS_HOTSPOT_BPF_H

#include "arch_hotspot.bpf.h"
#include "unwind.bpf.h"

enum hotspot_layout {
	HOTSPOT_HEAPS = 4,
	/*
	 * In a word of pc[], of an interpreted function: a bit that says so; whether it has noted
	 * the bytecode that it calls from; the lower 16 bits of that one's address, of which
	 * 65,535 bytes are all that a function may have; and below, an eighth of its Method's.
	 */
	HOTSPOT_INTERPRETED_BIT = 62,
	HOTSPOT_BYTECODE_BIT = 61,
	HOTSPOT_BYTECODE_SHIFT = 44,
	/* Steps through the map, in rounds: each is of up to 254 segments of 128 bytes. */
	HOTSPOT_ROUND_STEPS = 8,
	HOTSPOT_ROUNDS = 8,
	HOTSPOT_FREE = 0xff, /* in the map: no block is there */
};
#define HOTSPOT_PROCESSES  256
#define HOTSPOT_NO_SEGMENT (~0ULL)
#define HOTSPOT_FIRST	   (1ULL << 63)

struct hotspot_heap {
	__u64 start;
	__u64 end;
	__u64 map; /* where the byte of the first segment is */
	__u32 segment_shift;
	__u32 reserved;
};

/* What user space has found out of a process that has called exec. Offsets are in bytes. */
struct hotspot_process {
	struct hotspot_heap heaps[HOTSPOT_HEAPS];
	__u64 interpreter; /* the interpreter's code */
	__u64 interpreter_end;
	__u64 continuation; /* stubs that bring frames of a virtual thread to the stack */
	__u64 continuation_end;
	__u16 blob;	      /* in a block: the CodeBlob */
	__u16 frame_size;     /* in a CodeBlob: an int, in words; 0, -1: there is a frame pointer */
	__u16 frame_complete; /* bytes of the code until the frame is complete: a short or an int */
	__u16 code; /* where the code begins: an int, from the CodeBlob on, or a pointer */
	__u8 frame_complete_bytes;
	__u8 code_bytes;
	__u8 reserved[6];
};

/* By unwind_space()'s layout. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, HOTSPOT_PROCESSES);
	__type(key, __u64);
	__type(value, struct hotspot_process);
} hotspot_processes SEC(".maps");

/* A number of so many bytes. 0 also if it cannot be read. */
static __always_inline __s64 hotspot_number(__u64 at, __u8 bytes)
{
	__s64 number = 0;

	if (bpf_probe_read_user(&number, sizeof(number), (void *)at))
		return 0;
	if (bytes == 2)
		return (__s16)number;
	return bytes == 4 ? (__s32)number : number;
}

/*
 * Go back by the heap's map from a segment of a block to an earlier one. Returns that, with
 * HOTSPOT_FIRST if it is the block's first; HOTSPOT_NO_SEGMENT: it is in none.
 */
__noinline __u64 hotspot_segments_back(__u64 map, __u64 segment)
{
	__u8 back;

	for (long i = 0; i < HOTSPOT_ROUND_STEPS; i++) {
		if (bpf_probe_read_user(&back, sizeof(back), (void *)(map + segment)) ||
		    back == HOTSPOT_FREE || back > segment)
			return HOTSPOT_NO_SEGMENT;
		if (!back)
			return segment | HOTSPOT_FIRST;
		segment -= back;
	}
	return segment;
}

/*
 * The first segment of the block that a segment is in, by the heap's map;
 * HOTSPOT_NO_SEGMENT: none. Global, so that the verifier follows it once and not
 * again for each heap.
 */
__noinline __u64 hotspot_first_segment(__u64 map, __u64 segment)
{
	CALL_LOOP (long i = 0; i < HOTSPOT_ROUNDS && segment < HOTSPOT_FIRST; i++)
		segment = hotspot_segments_back(map, segment);
	if (segment == HOTSPOT_NO_SEGMENT || segment < HOTSPOT_FIRST)
		return HOTSPOT_NO_SEGMENT;
	return segment & ~HOTSPOT_FIRST;
}

/* The block that an address of a heap is in; 0: none. */
static __always_inline __u64 hotspot_block(const struct hotspot_heap *heap, __u64 pc)
{
	__u32 shift = heap->segment_shift & 63;
	__u64 segment = hotspot_first_segment(heap->map, (pc - heap->start) >> shift);

	return segment == HOTSPOT_NO_SEGMENT ? 0 : heap->start + (segment << shift);
}

/* The rule for code of a block. `at` is as in unwind_row(). */
static __always_inline __u64 hotspot_rule(const struct hotspot_process *process, __u64 block,
					  __u64 at)
{
	__u64 blob = block + process->blob, pc = (at + 1) >> 1, code;
	__s64 words = hotspot_number(blob + process->frame_size, 4);

	if (words > 0x7fff)
		return HOTSPOT_LOST;
	if (words <= 0)
		return hotspot_row_by_fp(UNWIND_BY_FP);
	if (at & 1) {
		code = hotspot_number(blob + process->code, process->code_bytes);
		if (process->code_bytes == 4)
			code += blob;
		if ((__s64)(pc - code) <
		    hotspot_number(blob + process->frame_complete, process->frame_complete_bytes))
			return hotspot_prologue(code, pc, words);
	}
	return hotspot_row_by_sp(words, 0);
}

/*
 * The rule for an address of generated code in the current process, as unwind_row()
 * gives them: UNWIND_NO_RULE if it is not HotSpot's. Global, so that the verifier
 * follows it once.
 */
__noinline __u64 hotspot_row(__u64 layout, __u64 at)
{
	const struct hotspot_process *process = bpf_map_lookup_elem(&hotspot_processes, &layout);
	__u64 address = (at - 1) >> 1, block;

	if (!process)
		return UNWIND_NO_RULE;
	if (address - process->interpreter < process->interpreter_end - process->interpreter)
		return hotspot_row_by_fp(UNWIND_INTERPRETED);
	/*
	 * When a virtual thread goes on, few of its frames come from the heap, and the last of
	 * these returns to a stub, which brings others: the frame behind is not its caller's.
	 */
	if (address - process->continuation < process->continuation_end - process->continuation)
		return UNWIND_IN_JAVA_HEAP;
	for (int i = 0; i < HOTSPOT_HEAPS; i++) {
		const struct hotspot_heap *heap = &process->heaps[i];

		if (address - heap->start >= heap->end - heap->start)
			continue;
		block = hotspot_block(heap, address);
		return block ? hotspot_rule(process, block, at) : HOTSPOT_LOST;
	}
	return UNWIND_NO_RULE;
}

/* Ask user space to look for HotSpot in the current process, unless it was asked just now. */
static __noinline int hotspot_ask(__u64 layout)
{
	if (!layout || bpf_map_lookup_elem(&hotspot_processes, &layout))
		return 0;
	return unwind_ask_interpreter(layout, ~layout, UNWIND_ASK_HOTSPOT);
}

#endif /* MEMTOOLS_HOTSPOT_BPF_H */
