/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * What a row of an unwind table says of the caller's registers on x86-64. The return address needs
 * no field: it is in the word below the CFA, where the call has pushed it.
 */
#ifndef MEMTOOLS_ARCH_ROW_BPF_H
#define MEMTOOLS_ARCH_ROW_BPF_H

#include "memtools.bpf.h"

/* First bits of the fields of a row, and the mask of enum unwind_frame_pointer. */
enum unwind_row_layout {
	UNWIND_FP_MASK = 3,
	UNWIND_FP_SHIFT = 4,
	UNWIND_FP_OFFSET_SHIFT = 6,
	UNWIND_CFA_SHIFT = 14,
	UNWIND_BEHIND_SHIFT = 16,
	UNWIND_THROUGH_SHIFT = 24,
};

enum unwind_frame_pointer {
	UNWIND_FP_KEPT,	     /* the caller's frame pointer is in its register */
	UNWIND_FP_AT_CFA,    /* it is at CFA + offset */
	UNWIND_FP_AT_FP,     /* it is at fp + offset */
	UNWIND_FP_FORGOTTEN, /* it is lost */
};

#endif /* MEMTOOLS_ARCH_ROW_BPF_H */
