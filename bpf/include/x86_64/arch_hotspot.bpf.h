/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Layout of the frames of HotSpot's generated code on the stack of x86-64, and beginnings of its
 * functions. A page fault after the interpreter has entered a function, and before the function has
 * its frame, is attributed to its caller, whose frame pointer is still in the register.
 */
#ifndef MEMTOOLS_ARCH_HOTSPOT_BPF_H
#define MEMTOOLS_ARCH_HOTSPOT_BPF_H

#include "unwind_row.bpf.h"

/*
 * Offsets from the frame pointer of an interpreted function to its caller's stack pointer, its
 * Method, and the address of its bytecode. The bytecode is noted before each call, except for calls
 * that the interpreter's code makes for itself.
 */
#define INTERPRETED_CALLER_SP	 -8
#define INTERPRETED_METHOD	 -24
#define INTERPRETED_BYTECODE	 -64
#define INTERPRETED_ADDRESS_BITS 47

/* Bytes before an interrupted instruction that are searched for its frame's allocation. */
#define HOTSPOT_PROLOGUE_BYTES 32

/* Row for unknown code in a known heap: it leads to an end of the walk that is counted. */
#define HOTSPOT_LOST UNWIND_STRANGE

/*
 * Returns the row for CFA = sp + 8 * words. The frame pointer is in its register if `kept`;
 * otherwise it is in the word below the return address.
 */
static __always_inline __u64 hotspot_row_by_sp(__u64 words, int kept)
{
	return kept ? row_of_kind(UNWIND_BY_SP, words) : row_with_saved_fp(UNWIND_BY_SP, words);
}

static __always_inline __u64 hotspot_row_by_fp(__u64 kind)
{
	return row_with_saved_fp(kind, 2);
}

/*
 * Returns the distance from the beginning of "sub $size,%rsp" to `pc`, if that instruction is among
 * those before `pc`, from `code` on; 0 if it is not. Global, so that the verifier follows the
 * function once.
 */
__noinline __u64 hotspot_after_sub(__u64 code, __u64 pc, __u64 size)
{
	/* The size takes one byte, or four. */
	__u64 instruction = (size < 0x80 ? 0xec8348 : 0xec8148) | size << 24, word;
	__u64 mask = size < 0x80 ? 0xffffffffULL : 0xffffffffffffffULL;

	for (__u64 back = 4; back <= HOTSPOT_PROLOGUE_BYTES; back++) {
		if (pc - code < back ||
		    bpf_probe_read_user(&word, sizeof(word), (void *)(pc - back)))
			return 0;
		if ((word & mask) == instruction)
			return back;
	}
	return 0;
}

/* Whether four bytes are push %rbp; mov %rsp,%rbp, of which there are two encodings. */
static __always_inline int hotspot_has_set_fp(__u64 bytes)
{
	return bytes == 0xec8b4855 || bytes == 0xe5894855;
}

/*
 * Returns the rule for an instruction that was interrupted before its function's frame was
 * complete. The frame is complete after one of
 *
 *	push %rbp; sub $SIZE,%rsp	push %rbp; mov %rsp,%rbp; sub $SIZE,%rsp
 *	sub $SIZE,%rsp; mov %rbp,...(%rsp)
 */
__noinline __u64 hotspot_prologue(__u64 code, __u64 pc, __u64 words)
{
	__u64 after = hotspot_after_sub(code, pc, words * 8 - 8);
	__u64 sub_bytes = words * 8 - 8 < 0x80 ? 4 : 7, first = 0, last = 0;

	if (after)
		return hotspot_row_by_sp(words, after == sub_bytes);
	if (words > 2 && hotspot_after_sub(code, pc, words * 8 - 16))
		return hotspot_row_by_sp(words, 0);
	if (pc - code < 4)
		return hotspot_row_by_sp(1, 1);
	if (bpf_probe_read_user(&first, 4, (void *)code) ||
	    bpf_probe_read_user(&last, 4, (void *)(pc - 4)))
		return HOTSPOT_LOST;
	/* Stubs begin so, and then save all registers. */
	if (hotspot_has_set_fp(first))
		return hotspot_row_by_fp(UNWIND_BY_FP);
	/* push %rbp */
	if (last >> 24 == 0x55 || hotspot_has_set_fp(last))
		return hotspot_row_by_sp(2, 0);
	return hotspot_row_by_sp(1, 1);
}

#endif /* MEMTOOLS_ARCH_HOTSPOT_BPF_H */
