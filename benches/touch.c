/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * touch PAGES: writes to PAGES new pages, as many programs first touch their pages. Prints the
 * nanoseconds of a page.
 */
#include "bench.h"

/* Pages are mapped and unmapped in pieces, so that the program stays small. */
#define PIECE 4096UL

STEP static void innermost(void)
{
	for (unsigned long done = 0; done < operations; done += PIECE) {
		unsigned long n = operations - done < PIECE ? operations - done : PIECE;
		char *at = map_pages(n);

		write_pages(at, n, PAGE);
		munmap(at, n * PAGE);
	}
}

int main(int argc, char **argv)
{
	return bench(argc, argv);
}
