// SPDX-License-Identifier: BSD-2-Clause
/*
 * A process that grows: takes MB megabytes a second from "go" on, up to MOST
 * megabytes, in twenty pieces a second, and keeps them until it is killed.
 * With each piece, allocates and frees BLOCKS small blocks (default: none).
 *
 * facts: none; it does not end by itself
 */
#include "workload.h"
#include <time.h>

#define PIECES 20

STEP static void take_more(unsigned long pages)
{
	write_pages(map_pages(pages), pages, PAGE);
}

STEP static void churn(unsigned long blocks)
{
	void *volatile block;

	for (unsigned long i = 0; i < blocks; i++) {
		block = malloc(100);
		free(block);
	}
}

int main(int argc, char **argv)
{
	const struct timespec moment = { .tv_nsec = 1000000000 / PIECES };
	unsigned long piece, pieces, blocks;

	if (argc != 3 && argc != 4)
		usage("MB MOST [BLOCKS]");
	piece = (count(argv[1]) << (20 - 12)) / PIECES;
	if (!piece)
		die("at least 1 MB a second");
	pieces = (count(argv[2]) << (20 - 12)) / piece;
	blocks = argc == 4 ? count(argv[3]) : 0;
	ready();
	for (unsigned long i = 0; i < pieces; i++) {
		take_more(piece);
		churn(blocks);
		nanosleep(&moment, NULL);
	}
	for (;;)
		pause();
}
