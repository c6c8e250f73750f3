/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Format of a Python frame in a user stack, and of the code object that it executes, as sent to
 * user space: what python.bpf.h and user space must agree on.
 */
#ifndef MEMTOOLS_PYTHON_CODE_BPF_H
#define MEMTOOLS_PYTHON_CODE_BPF_H

#include "memtools.bpf.h"

/*
 * A word of pc[] with PYTHON_WORD set is a frame of Python, or one of the marks
 * below. Frames follow the native frame of the interpreter's loop that executes
 * them, innermost first.
 *
 *	bit  63     PYTHON_WORD
 *	bits 62:20  a hash that identifies the code object: of its process, its address, and
 *	            the generation of its bucket (python_word.bpf.h); not 0
 *	     19:0   the instruction that the frame is at, in code units of two bytes
 *	            from the first; or PYTHON_NOT_BEGUN
 */
#define PYTHON_WORD		(1ULL << 63)
#define PYTHON_INSTRUCTION_BITS 20

enum python_mark {
	PYTHON_UNPAIRED, /* no native frame was found for the loops of the frames behind it */
	PYTHON_CUT,	 /* Python has further frames, which were not read or did not fit */
};

enum python_instruction {
	PYTHON_NOT_BEGUN = 0xfffff, /* before the first: the line is the definition's */
};

/*
 * Code object, sent through the ring buffer `python_codes` before the first stack that contains it
 * is stored. Bytes of its file's name, its own name and its line table follow, as many of each as
 * are given here. The rest of a text was too long, or on a page that was not in memory; it is at
 * its address until the code object is freed.
 */
struct python_code {
	__u64 word;    /* as in pc[], with the instruction 0 */
	__u64 address; /* of the code object */
	__u64 file_at; /* address of the text; 0: not even that could be read */
	__u64 name_at;
	__u64 lines_at;
	__u32 file_length; /* length of the whole text, in bytes */
	__u32 name_length;
	__u32 lines_length;
	__u32 pid; /* in the tool's PID namespace */
	__u32 first_line;
	__u16 file_bytes; /* bytes of the text that follow */
	__u16 name_bytes;
	__u16 lines_bytes;
	__u8 file_kind; /* bytes of a character, 1 (Latin 1), 2 or 4 (native byte order) */
	__u8 name_kind;
	__u8 minor; /* of the version, 3.minor: determines the format of the line table */
	__u8 reserved[3];
};

#endif /* MEMTOOLS_PYTHON_CODE_BPF_H */
