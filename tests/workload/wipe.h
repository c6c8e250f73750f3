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
#ifdef __aarch64__
	asm volatile(
	    "mov x19, xzr\n\tmov x20, xzr\n\tmov x21, xzr\n\tmov x22, xzr\n\tmov x23, xzr\n\t"
	    "mov x24, xzr\n\tmov x25, xzr\n\tmov x26, xzr\n\tmov x27, xzr\n\tmov x28, xzr" ::
		: "x19", "x20", "x21", "x22", "x23", "x24", "x25", "x26", "x27", "x28", "memory");
#else
	asm volatile("xor %%ebx, %%ebx\n\txor %%r12d, %%r12d\n\txor %%r13d, %%r13d\n\t"
		     "xor %%r14d, %%r14d\n\txor %%r15d, %%r15d" ::
			 : "rbx", "r12", "r13", "r14", "r15", "memory");
#endif
}

/* Waits for ever, with an address that is in a register and nowhere else. */
static inline void hold_in_one_register(void *address)
{
#ifdef __aarch64__
	/* ppoll(2) of nothing */
	asm volatile("mov x19, %0\n\tmov %0, xzr\n"
		     "1: mov x0, xzr\n\tmov x1, xzr\n\tmov x2, xzr\n\tmov x3, xzr\n\t"
		     "mov x8, #73\n\tsvc #0\n\tb 1b\n" ::"r"(address)
		     : "x0", "x1", "x2", "x3", "x8", "x19", "memory");
#else
	/* pause(2) */
	asm volatile("mov %0, %%r12\n\tmov $0, %0\n"
		     "1: mov $34, %%eax\n\tsyscall\n\tjmp 1b\n" ::"r"(address)
		     : "r12", "rax", "rcx", "r11", "memory");
#endif
}

#endif
