/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * How a frame of Python is told in a user stack, and what is sent of the code
 * object that it executes: what python.bpf.h and user space have to agree on.
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
 *	bits 62:20  a hash that names the code object: of its process, its address,
 *	            and how many code objects have died in its place; not 0
 *	     19:0   the instruction that the frame is at, in code units of two bytes
 *	            from the first; or PYTHON_NOT_BEGUN
 */
#define PYTHON_WORD		(1ULL << 63)
#define PYTHON_INSTRUCTION_BITS 20

enum python_mark {
	PYTHON_UNPAIRED, /* what follows belongs to loops that are among no native frames before */
	PYTHON_CUT,	 /* Python has further frames, which could not be read or had no room */
};

enum python_instruction {
	PYTHON_NOT_BEGUN = 0xfffff, /* before the first: the line is that of the definition */
};

/*
 * A code object, in the ring buffer `python_codes`, sent before the first stack
 * that it is in is stored. Bytes of its file's name, its own name and its line
 * table follow, so many of each as are said here. What is not here of a text was
 * too long, or in no page that was in memory; it is at its address until the code
 * object dies.
 */
struct python_code {
	__u64 word;    /* as in pc[], with the instruction 0 */
	__u64 address; /* of the code object */
	__u64 file_at; /* of the text's first byte; 0: not even that could be read */
	__u64 name_at;
	__u64 lines_at;
	__u32 file_length; /* bytes of all of it */
	__u32 name_length;
	__u32 lines_length;
	__u32 pid; /* in the tool's PID namespace */
	__u32 first_line;
	__u16 file_bytes; /* bytes of it that follow */
	__u16 name_bytes;
	__u16 lines_bytes;
	__u8 file_kind; /* bytes of a character, 1 (Latin 1), 2 or 4 (of this byte order) */
	__u8 name_kind;
	__u8 minor; /* of the version, 3.minor: it says how the line table is read */
	__u8 reserved[3];
};

#endif /* MEMTOOLS_PYTHON_CODE_BPF_H */
