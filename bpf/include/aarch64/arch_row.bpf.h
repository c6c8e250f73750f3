/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * What a row of an unwind table says of the caller's registers on arm64. A call leaves the return
 * address in a register (x30, the link register), and the function that is called stores it where
 * it likes: in nine of ten functions beside the frame pointer (x29), as a frame record.
 */
#ifndef MEMTOOLS_ARCH_ROW_BPF_H
#define MEMTOOLS_ARCH_ROW_BPF_H

#include "memtools.bpf.h"

/* First bits of the fields of a row, and the mask of enum unwind_frame_pointer. */
enum unwind_row_layout {
	UNWIND_FP_MASK = 7,
	UNWIND_FP_SHIFT = 4,
	UNWIND_FP_OFFSET_SHIFT = 7,
	UNWIND_CFA_SHIFT = 15,
	UNWIND_BEHIND_SHIFT = 16,
	UNWIND_THROUGH_SHIFT = 24,
};

/* Where the caller's frame pointer and the return address are. The base is that of the CFA. */
enum unwind_frame_pointer {
	UNWIND_FP_KEPT,	     /* both are in their registers */
	UNWIND_FP_AT_CFA,    /* a record, at CFA + offset */
	UNWIND_FP_AT_BASE,   /* a record, at base + offset */
	UNWIND_LINK_AT_CFA,  /* the return address at CFA + offset; the frame pointer is kept */
	UNWIND_LINK_AT_BASE, /* the same, at base + offset */
	UNWIND_FP_BELOW, /* the return address at CFA + offset; the frame pointer two words below */
};

#endif /* MEMTOOLS_ARCH_ROW_BPF_H */
