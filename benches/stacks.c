/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * stacks COUNT: brk(2), COUNT times, each with a stack of 22 frames. Prints the nanoseconds of a
 * call. brk(0) only returns the end of the heap, which costs little.
 */
#include "bench.h"

#define DEEPER 8

STEP static void descend(unsigned long depth)
{
	if (depth > 0) {
		descend(depth - 1);
		__asm__ volatile("");
		return;
	}
	for (unsigned long i = 0; i < operations; i++)
		syscall(SYS_brk, 0);
}

STEP static void innermost(void)
{
	descend(DEEPER);
	__asm__ volatile("");
}

int main(int argc, char **argv)
{
	return bench(argc, argv);
}
