/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Row of an unwind table: the rule by which the caller of a frame is found, in a word of eight
 * bytes. User space (src/stacks/unwind/rules.rs) writes rows.
 */
#ifndef MEMTOOLS_UNWIND_ROW_BPF_H
#define MEMTOOLS_UNWIND_ROW_BPF_H

#include "arch_row.bpf.h"

/*
 * Rule for a step from a frame to its caller's. The CFA (canonical frame address) is the caller's
 * stack pointer before the call. arch_row.bpf.h has the layout: from the lowest bits on,
 *
 *	enum unwind_kind, 4 bits
 *	enum unwind_frame_pointer
 *	offset of the saved frame pointer in words, 8 bits; of UNWIND_BY_REGISTER, the register
 *	offset of CFA in words, without a sign, up to bit 31
 *	the byte of the file from which the rule is valid; in a row that was looked up, the number
 *	of the file: bits 63:32
 */
enum unwind_kind {
	UNWIND_NO_RULE,	     /* code without unwind information: generated, or assembler's */
	UNWIND_BY_SP,	     /* CFA = sp + offset */
	UNWIND_BY_FP,	     /* CFA = fp + offset */
	UNWIND_PLT,	     /* CFA = stack_plt_cfa() with `offset` */
	UNWIND_SIGNAL,	     /* the kernel's frame of a signal is at sp */
	UNWIND_ROOT,	     /* there is no caller */
	UNWIND_THROUGH_FP,   /* CFA = the word at fp + bits 31:24, + bits 23:16 */
	UNWIND_THROUGH_SP,   /* CFA = the word at sp + bits 31:24, + bits 23:16 */
	UNWIND_STRANGE,	     /* a rule that no row can hold */
	UNWIND_NO_CODE,	     /* the process has mapped no code there */
	UNWIND_NO_ROOM,	     /* the file has rules, which did not fit */
	UNWIND_NO_TABLE,     /* user space has not looked at the file yet */
	UNWIND_FIBER_END,    /* no call returns there: the end of a fiber */
	UNWIND_INTERPRETED,  /* as UNWIND_BY_FP; the frame has the caller's sp, too */
	UNWIND_IN_JAVA_HEAP, /* the callers' frames are in Java's heap: a virtual thread's */
	UNWIND_BY_REGISTER,  /* CFA = another register + offset, in the innermost frame; fp is kept
			      */
};

/* Returns how the caller is found: enum unwind_kind. */
static __always_inline __u64 row_kind(__u64 row)
{
	return row & 0xf;
}

/* Whether the row alone tells where the caller's frame is, as most do. */
static __always_inline int row_is_plain(__u64 row)
{
	const __u32 plain = 1 << UNWIND_BY_SP | 1 << UNWIND_BY_FP | 1 << UNWIND_PLT |
			    1 << UNWIND_THROUGH_FP | 1 << UNWIND_THROUGH_SP;

	return plain >> row_kind(row) & 1;
}

/* Returns how the caller's frame pointer is found: enum unwind_frame_pointer. */
static __always_inline __u64 row_frame_pointer(__u64 row)
{
	return row >> UNWIND_FP_SHIFT & UNWIND_FP_MASK;
}

/* Returns the offset of the saved frame pointer, in words. */
static __always_inline long row_fp_offset(__u64 row)
{
	return (__s8)(row >> UNWIND_FP_OFFSET_SHIFT);
}

/* Returns the offset of the CFA, in words; of UNWIND_PLT, a byte of the entry. */
static __always_inline long row_cfa_offset(__u64 row)
{
	return (__u32)row >> UNWIND_CFA_SHIFT;
}

/* Returns the DWARF number of the register, for UNWIND_BY_REGISTER. */
static __always_inline __u64 row_register(__u64 row)
{
	return row_fp_offset(row);
}

/*
 * Returns the offset, in words, of the word that leads to the CFA, for UNWIND_THROUGH_FP and
 * UNWIND_THROUGH_SP.
 */
static __always_inline long row_through_offset(__u64 row)
{
	return (__s32)row >> UNWIND_THROUGH_SHIFT;
}

/*
 * Returns the offset, in words, of the CFA from the value of the word that leads to it, for
 * UNWIND_THROUGH_FP and UNWIND_THROUGH_SP.
 */
static __always_inline long row_behind_offset(__u64 row)
{
	return (__s8)(row >> UNWIND_BEHIND_SHIFT);
}

/* Returns a row of a kind whose CFA is `words` from its base, and that keeps the frame pointer. */
static __always_inline __u64 row_of_kind(__u64 kind, __u64 words)
{
	return kind | UNWIND_FP_KEPT << UNWIND_FP_SHIFT | words << UNWIND_CFA_SHIFT;
}

/*
 * Returns a row of a kind whose CFA is `words` from its base, and whose frame pointer is saved in
 * the word below the return address.
 */
static __always_inline __u64 row_with_saved_fp(__u64 kind, __u64 words)
{
	return row_of_kind(kind, words) | UNWIND_FP_AT_CFA << UNWIND_FP_SHIFT |
	       (-2 & 0xff) << UNWIND_FP_OFFSET_SHIFT;
}

/* Returns the number of the file, in a row that was looked up. */
static __always_inline __u64 row_file(__u64 row)
{
	return row >> 32;
}

/* Returns a row that has the number of a file, and no rule. */
static __always_inline __u64 row_of_file(__u64 number)
{
	return number << 32;
}

#endif /* MEMTOOLS_UNWIND_ROW_BPF_H */
