/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * A pool whose functions are probed at their entry (pool_take) and behind it (pool_give).
 * pool_give jumps to its return if it was given no block.
 *
 *   pool COUNT SIZE   takes and gives back COUNT blocks and keeps as many
 */
#include "pool.h"

void *pool_take(unsigned long bytes);
void pool_give(void *block);

FUNCTION("pool_take", "sub $8, %rsp\n.cfi_def_cfa_offset 16\ncall take\n"
		      "add $8, %rsp\n.cfi_def_cfa_offset 8\nret\n");
FUNCTION("pool_give", "test %rdi, %rdi\nje 1f\njmp give\n1: ret\n");

STEP static void take_and_give(unsigned long blocks, unsigned long size)
{
	for (unsigned long i = 0; i < blocks; i++) {
		kept = pool_take(size);
		pool_give(pool_take(size));
	}
}

int main(int argc, char **argv)
{
	if (argc != 3)
		usage("COUNT SIZE");
	ready();
	take_and_give(count(argv[1]), count(argv[2]));
	done();
	return 0;
}
