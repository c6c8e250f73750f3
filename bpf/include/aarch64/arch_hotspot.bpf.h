/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Layout of the frames of HotSpot's generated code on the stack of arm64. User space looks for no
 * HotSpot on arm64 yet (src/interpreters/hotspot/aarch64.rs): walks end in its code, and are
 * counted.
 */
#ifndef MEMTOOLS_ARCH_HOTSPOT_BPF_H
#define MEMTOOLS_ARCH_HOTSPOT_BPF_H

#include "unwind_row.bpf.h"

/*
 * Offsets from the frame pointer of an interpreted function to its caller's stack pointer, its
 * Method, and the address of its bytecode.
 */
#define INTERPRETED_CALLER_SP	 -8
#define INTERPRETED_METHOD	 -24
#define INTERPRETED_BYTECODE	 -64
#define INTERPRETED_ADDRESS_BITS 48

/* Row for unknown code in a known heap: it leads to an end of the walk that is counted. */
#define HOTSPOT_LOST UNWIND_STRANGE

/*
 * Returns the row for CFA = sp + 8 * words. The frame record is at the end of the frame, or still
 * in registers if `kept`.
 */
static __always_inline __u64 hotspot_row_by_sp(__u64 words, int kept)
{
	return kept ? row_of_kind(UNWIND_BY_SP, words) : row_with_saved_fp(UNWIND_BY_SP, words);
}

static __always_inline __u64 hotspot_row_by_fp(__u64 kind)
{
	return row_with_saved_fp(kind, 2);
}

/* Returns the rule for an instruction that was interrupted before its frame was complete: none. */
static __always_inline __u64 hotspot_prologue(__u64 code, __u64 pc, __u64 words)
{
	return HOTSPOT_LOST;
}

#endif /* MEMTOOLS_ARCH_HOTSPOT_BPF_H */
