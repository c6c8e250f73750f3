/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Unwinding of HotSpot's generated code, which keeps no frame pointers.
 *
 * The code is in a few heaps. Each heap has a map, with one byte for each segment of the heap, that
 * leads from any address to the block that contains it. A block begins with a header and the
 * description of its code (CodeBlob), which has the size of the code's frame. So the caller of a
 * compiled function is found by the size of the frame; the caller of the interpreter and of stubs,
 * which have no size, by frame pointer.
 *
 * User space (src/interpreters/hotspot) finds the heaps of a process and the offsets of these
 * fields, which the virtual machine exports for debuggers. Memory of the process may hold anything:
 * whatever is read leads to one row, in the format of unwind_row.bpf.h.
 */
#ifndef MEMTOOLS_HOTSPOT_BPF_H
#define MEMTOOLS_HOTSPOT_BPF_H

#include "arch_hotspot.bpf.h"
#include "unwind.bpf.h"

enum hotspot_layout {
	HOTSPOT_HEAPS = 4,
	/*
	 * Layout of a word in pc[] for an interpreted function: a bit that marks the word; a bit
	 * that is set if the function has noted the bytecode that it calls from; the lower 16 bits
	 * of that bytecode's address, as a function has at most 65,535 bytes; and below, an eighth
	 * of the address of its Method.
	 */
	HOTSPOT_INTERPRETED_BIT = 62,
	HOTSPOT_BYTECODE_BIT = 61,
	HOTSPOT_BYTECODE_SHIFT = 44,
	/* Steps through the map, in rounds. A step goes back by up to 254 segments of 128 bytes. */
	HOTSPOT_ROUND_STEPS = 8,
	HOTSPOT_ROUNDS = 8,
	HOTSPOT_FREE = 0xff, /* in the map: the segment is in no block */
};
#define HOTSPOT_PROCESSES  256
#define HOTSPOT_NO_SEGMENT (~0ULL)
#define HOTSPOT_FIRST	   (1ULL << 63)

struct hotspot_heap {
	__u64 start;
	__u64 end;
	__u64 map; /* address of the byte of the first segment */
	__u32 segment_shift;
	__u32 reserved;
};

/*
 * Layout of HotSpot in a process that has called exec, as user space has found it. Offsets are in
 * bytes.
 */
struct hotspot_process {
	struct hotspot_heap heaps[HOTSPOT_HEAPS];
	__u64 interpreter; /* the interpreter's code */
	__u64 interpreter_end;
	__u64 continuation; /* stubs that copy frames of a virtual thread to the stack */
	__u64 continuation_end;
	__u16 blob;	      /* in a block: the CodeBlob */
	__u16 frame_size;     /* in a CodeBlob: an int, in words; 0, -1: by frame pointer */
	__u16 frame_complete; /* bytes of the code until the frame is complete: a short or an int */
	__u16 code;	      /* start of the code: an int, from the CodeBlob on, or a pointer */
	__u8 frame_complete_bytes;
	__u8 code_bytes;
	__u8 reserved[6];
};

/* Layout of HotSpot in each process, by the `layout` of unwind_space(). */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, HOTSPOT_PROCESSES);
	__type(key, __u64);
	__type(value, struct hotspot_process);
} hotspot_processes SEC(".maps");

/*
 * Reads a signed number of `bytes` bytes of the current process. Returns 0 also if it cannot be
 * read.
 */
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
 * Goes back in the heap's map from a segment of a block to an earlier one. Returns the earlier
 * segment, with HOTSPOT_FIRST if it is the block's first; HOTSPOT_NO_SEGMENT if the segment is in
 * no block.
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
 * Returns the first segment of the block that contains a segment, by the heap's map;
 * HOTSPOT_NO_SEGMENT if no block does. Global, so that the verifier follows the function once and
 * not again for each heap.
 */
__noinline __u64 hotspot_first_segment(__u64 map, __u64 segment)
{
	CALL_LOOP (long i = 0; i < HOTSPOT_ROUNDS && segment < HOTSPOT_FIRST; i++)
		segment = hotspot_segments_back(map, segment);
	if (segment == HOTSPOT_NO_SEGMENT || segment < HOTSPOT_FIRST)
		return HOTSPOT_NO_SEGMENT;
	return segment & ~HOTSPOT_FIRST;
}

/* Returns the block that contains an address of a heap; 0: none. */
static __always_inline __u64 hotspot_block(const struct hotspot_heap *heap, __u64 pc)
{
	__u32 shift = heap->segment_shift & 63;
	__u64 segment = hotspot_first_segment(heap->map, (pc - heap->start) >> shift);

	return segment == HOTSPOT_NO_SEGMENT ? 0 : heap->start + (segment << shift);
}

/* Returns the rule for code of a block. `at` is as in unwind_row(). */
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
 * Returns the rule for an address of generated code in the current process, as unwind_row() does;
 * UNWIND_NO_RULE if the code is not HotSpot's. Global, so that the verifier follows the function
 * once.
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
	 * When a virtual thread continues, only a few of its frames are copied from the heap. The
	 * last of these returns to a stub, which copies more: the frame behind it on the stack is
	 * not its caller's.
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

/* Asks user space to look for HotSpot in the current process, unless it was asked just now. */
static __noinline int hotspot_request(__u64 layout)
{
	if (!layout || bpf_map_lookup_elem(&hotspot_processes, &layout))
		return 0;
	return unwind_request_interpreter(layout, ~layout, UNWIND_SUBJECT_HOTSPOT);
}

#endif /* MEMTOOLS_HOTSPOT_BPF_H */
