/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * many BLOCKS LOST: allocates BLOCKS blocks of 24 bytes. LOST of them, evenly spread,
 * are referred to by nothing; the others are a list, whose first block is the last one
 * allocated. The work is to walk the list. The facts are the number of blocks in the
 * list, and the number of those that do not hold what was written.
 */
#include "workload.h"
#include "wipe.h"

struct block {
	struct block *next;
	unsigned long number;
	unsigned long check;
};

static struct block *volatile list;

STEP static void make(unsigned long blocks, unsigned long lost)
{
	const unsigned long step = blocks / lost;
	struct block *head = NULL;

	for (unsigned long i = 0; i < blocks; i++) {
		struct block *block = malloc(sizeof(*block));

		if (!block)
			die("no memory");
		*block = (struct block){ .number = i, .check = ~i };
		if (i % step == step / 2 && i / step < lost)
			continue;
		block->next = head;
		head = block;
	}
	list = head;
}

int main(int argc, char **argv)
{
	unsigned long blocks = 0, wrong = 0;

	if (argc != 3)
		usage("BLOCKS LOST");
	make(count(argv[1]), count(argv[2]));
	wipe();
	ready();
	for (struct block *block = list; block; block = block->next) {
		blocks++;
		wrong += block->check != ~block->number;
	}
	fact("blocks", "%lu", blocks);
	fact("wrong", "%lu", wrong);
	done();
	return 0;
}
