/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * A library for unwind.c like unwind_plugin.c, for whose unwind information 2 MiB are not enough:
 * it has more than 2^18 rules. %rbp is a frame's, but not that of the function that calls back.
 */
#include <alloca.h>

__asm__(".text\n"
	".type padding, @function\n"
	"padding:\n"
	".cfi_startproc\n"
	".rept 1 << 17\n"
	"nop\n"
	".cfi_def_cfa_offset 16\n"
	"nop\n"
	".cfi_def_cfa_offset 8\n"
	".endr\n"
	"ret\n"
	".cfi_endproc\n"
	".size padding, . - padding\n");

static volatile unsigned long bytes = 100;

__attribute__((noinline)) static void without_frame_pointer(void (*back)(void))
{
	back();
	__asm__ volatile("" : : : "memory");
}

void through_plugin(void (*back)(void))
{
	char *memory = (char *)alloca(bytes);

	without_frame_pointer(back);
	__asm__ volatile("" : : "r"(memory) : "memory");
}
