// SPDX-License-Identifier: BSD-2-Clause
/*
 * Allocates 23 blocks of 1000 bytes every 10 ms, after the first line and until there is another.
 *
 *	growing lose|keep
 */
#include <poll.h>
#include "workload.h"

struct block {
	struct block *next;
	char body[1000 - sizeof(struct block *)];
};

static struct block *kept;

STEP static void grow(bool keep)
{
	for (int i = 0; i < 23; i++) {
		struct block *block = malloc(sizeof(*block));

		if (!block)
			die("no memory");
		memset(block, 0, sizeof(*block));
		if (!keep)
			continue;
		block->next = kept;
		kept = block;
	}
}

int main(int argc, char **argv)
{
	struct pollfd input = { 0, POLLIN, 0 };
	bool keep = argc == 2 && !strcmp(argv[1], "keep");

	if (!keep && (argc != 2 || strcmp(argv[1], "lose")))
		usage("lose|keep");
	ready();
	while (poll(&input, 1, 10) == 0)
		grow(keep);
	wait_for_line();
	done();
	return 0;
}
