/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * A step that leaves no copy of a pointer behind.
 */
#ifndef WIPE_H
#define WIPE_H

#include "workload.h"

/*
 * Overwrites registers, and the stack of frames that have returned. (A new thread gets the stack of
 * one that has ended.)
 */
STEP static void wipe(void)
{
	volatile char stack[32768];

	for (unsigned long i = 0; i < sizeof(stack); i++)
		stack[i] = 0;
	asm volatile("xor %%ebx, %%ebx\n\txor %%r12d, %%r12d\n\txor %%r13d, %%r13d\n\t"
		     "xor %%r14d, %%r14d\n\txor %%r15d, %%r15d" ::
			 : "rbx", "r12", "r13", "r14", "r15", "memory");
}

#endif
