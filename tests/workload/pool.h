/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Pool for functions that are written in assembler (FUNCTION), which take from it and give back.
 */
#ifndef POOL_H
#define POOL_H

#include "workload.h"

static char room[16 << 20];
static unsigned long used;
static void *volatile kept;

__attribute__((used)) static void *take(unsigned long bytes)
{
	void *block = room + used;

	used += (bytes + 15) & ~15UL;
	if (used > sizeof(room))
		die("the pool is empty; use smaller counts");
	return block;
}

__attribute__((used)) static void give(void *block)
{
	__asm__ volatile("" : : "r"(block) : "memory");
}

/* Defines a function of this name, with unwind information that `code` can continue. */
#define FUNCTION(name, code)                                                                       \
	__asm__(".text\n.globl " name "\n.type " name ", @function\n" name                         \
		":\n.cfi_startproc\n" code ".cfi_endproc\n.size " name ", . - " name "\n")

#endif /* POOL_H */
