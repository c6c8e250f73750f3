/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * libvictim.so: a function with a constant in its code, where a breakpoint would
 * change the result. Built with -DDECOY the library has the same code, and symbols that
 * place malloc and free in the middle of the constant.
 */
__asm__(".text\n"
	".globl work\n"
	".type work, @function\n"
	"work:\n"
	"	movabsq $0x1122334455667788, %rax\n"
	"	xorq %rdi, %rax\n"
	"	ret\n"
	".size work, .-work\n"
#ifdef DECOY
	".globl malloc, free\n"
	".type malloc, @function\n"
	".type free, @function\n"
	".set malloc, work + 4\n"
	".set free, work + 5\n"
	".size malloc, 1\n"
	".size free, 1\n"
#endif
);
