/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * A pool whose functions begin with a nop of five bytes, as compilers leave it for
 * tracers (-mfentry, -fpatchable-function-entry), in a program that forks.
 *
 *   nops COUNT SIZE CHILDREN   takes and gives back COUNT blocks and keeps as many. Then starts
 *                              CHILDREN children, each of which does so with one block. died is
 *                              the number of children that were killed
 *
 * nop_take continues with an instruction that moves the stack pointer, nop_give with a jump.
 * nop_spin jumps back to just behind its nop, from two places.
 */
#include "pool.h"

void *nop_take(unsigned long bytes);
void nop_give(void *block);
void *nop_spin(unsigned long bytes);

__attribute__((used)) static char spun[16];

#define NOP_FUNCTION(name, code) FUNCTION(name, ".byte 0x0f, 0x1f, 0x44, 0, 0\n" code)

NOP_FUNCTION("nop_take", "sub $8, %rsp\n.cfi_def_cfa_offset 16\ncall take\n"
			 "add $8, %rsp\n.cfi_def_cfa_offset 8\nret\n");
NOP_FUNCTION("nop_give", "jmp give\n");
NOP_FUNCTION("nop_spin", "1: dec %rdi\njns 1b\njg 1b\nlea spun(%rip), %rax\nret\n");

STEP static void take_and_give(unsigned long blocks, unsigned long size)
{
	for (unsigned long i = 0; i < blocks; i++) {
		kept = nop_take(size);
		nop_give(nop_take(size));
		kept = nop_spin(1);
	}
}

int main(int argc, char **argv)
{
	unsigned long blocks, size, children, died = 0;

	if (argc != 4)
		usage("COUNT SIZE CHILDREN");
	blocks = count(argv[1]);
	size = count(argv[2]);
	children = count(argv[3]);
	ready();
	take_and_give(blocks, size);
	for (unsigned long i = 0; i < children; i++) {
		pid_t child = fork();
		int status;

		if (child < 0)
			die("cannot fork: %s", strerror(errno));
		if (!child) {
			take_and_give(1, size);
			_exit(0);
		}
		if (waitpid(child, &status, 0) != child)
			die("cannot wait for a child: %s", strerror(errno));
		died += status != 0;
	}
	fact("died", "%lu", died);
	done();
	return 0;
}
