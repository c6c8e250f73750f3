/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Debug information (DWARF 4) of one function, allocate(), into which calls are
 * inlined a million deep: who reads it by recursion has no stack left.
 */
#define DEPTH 1000000
#define END   .quad allocate + 4096

	.section .note.GNU-stack, "", @progbits

	.section .debug_abbrev, "", @progbits
	/* A unit, a function, a call: each has more within, and its addresses. */
	.uleb128 1, 0x11
	.byte	1
	.uleb128 0x10, 0x17, 0x11, 0x01, 0x12, 0x01, 0, 0
	.uleb128 2, 0x2e
	.byte	1
	.uleb128 0x03, 0x08, 0x11, 0x01, 0x12, 0x01, 0, 0
	.uleb128 3, 0x1d
	.byte	1
	.uleb128 0x11, 0x01, 0x12, 0x01, 0, 0
	.uleb128 0

	.section .debug_info, "", @progbits
	.long	unit_end - unit
unit:
	.short	4
	.long	.debug_abbrev
	.byte	8
	.uleb128 1
	.long	.debug_line
	.quad	allocate
	END
	.uleb128 2
	.asciz	"allocate"
	.quad	allocate
	END
	.rept	DEPTH
	.uleb128 3
	.quad	allocate
	END
	.endr
	.skip	DEPTH + 2, 0
unit_end:

	.section .debug_line, "", @progbits
	.long	lines_end - lines
lines:
	.short	4
	.long	program - header
header:
	.byte	1, 1, 1, -5, 14, 13
	.byte	0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1
	.byte	0
	.asciz	"bomb.c"
	.uleb128 0, 0, 0
	.byte	0
program:
	.byte	0
	.uleb128 9
	.byte	2
	.quad	allocate
	.byte	1
	.byte	2
	.uleb128 4096
	.byte	0
	.uleb128 1
	.byte	1
lines_end:
