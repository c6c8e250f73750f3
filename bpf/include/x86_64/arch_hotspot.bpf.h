/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * How the frames of HotSpot's generated code lie on the stack of x86-64, and what its
 * functions begin with. A page fault between the interpreter's entry to a function and the
 * function's frame is taken for one of its caller, whose frame pointer is there still.
 */
#ifndef MEMTOOLS_ARCH_HOTSPOT_BPF_H
#define MEMTOOLS_ARCH_HOTSPOT_BPF_H

#include "unwind_row.bpf.h"

/*
 * Where, from its frame pointer on, an interpreted function's frame has its caller's stack pointer,
 * its Method, and the address of its bytecode, which is noted before each call but those that
 * the interpreter's code makes for itself.
 */
#define INTERPRETED_CALLER_SP	 -8
#define INTERPRETED_METHOD	 -24
#define INTERPRETED_BYTECODE	 -64
#define INTERPRETED_ADDRESS_BITS 47

/* In the first so many bytes before an address a function has made room for its frame. */
#define HOTSPOT_PROLOGUE_BYTES 32

/* What leads on where the heap is known, and what is in it is not: to an end that is counted. */
#define HOTSPOT_LOST UNWIND_STRANGE

/* CFA = sp + 8 * words, and the frame pointer is kept or, with all others, below the return
 * address. */
static __always_inline __u64 hotspot_row_by_sp(__u64 words, int kept)
{
	__u64 row = UNWIND_BY_SP | words << 16;

	return kept ? row | UNWIND_FP_KEPT << 4 : row | UNWIND_FP_AT_CFA << 4 | (-2 & 0xff) << 8;
}

static __always_inline __u64 hotspot_row_by_fp(__u64 kind)
{
	return kind | UNWIND_FP_AT_CFA << 4 | (-2 & 0xff) << 8 | 2 << 16;
}

/*
 * Whether "sub $size,%rsp" is among the instructions before `pc`, from `code` on. Returns
 * how many bytes after its beginning `pc` is; 0: it is not there. Global, so that the verifier
 * follows it once.
 */
__noinline __u64 hotspot_after_sub(__u64 code, __u64 pc, __u64 size)
{
	/* A size of one byte, or of four. */
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
 * The rule at an instruction that was interrupted before its function's frame was
 * complete, which is after one of
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
	/* Of stubs, which save all registers then. */
	if (hotspot_has_set_fp(first))
		return hotspot_row_by_fp(UNWIND_BY_FP);
	/* push %rbp */
	if (last >> 24 == 0x55 || hotspot_has_set_fp(last))
		return hotspot_row_by_sp(2, 0);
	return hotspot_row_by_sp(1, 1);
}

#endif /* MEMTOOLS_ARCH_HOTSPOT_BPF_H */
