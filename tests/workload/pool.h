/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * A pool that functions written in assembler, given by FUNCTION, take from and give back to.
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

/* A function of this name, with unwind information that the code can go on with. */
#define FUNCTION(name, code)                                                                       \
	__asm__(".text\n.globl " name "\n.type " name ", @function\n" name                         \
		":\n.cfi_startproc\n" code ".cfi_endproc\n.size " name ", . - " name "\n")

#endif /* POOL_H */
