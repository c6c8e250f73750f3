// SPDX-License-Identifier: BSD-2-Clause
/*
 * COUNT pairs of mmap(2) and munmap(2), of one page each, as fast as possible.
 *
 * facts: pairs
 */
#include "workload.h"

int main(int argc, char **argv)
{
	unsigned long pairs;

	if (argc != 2)
		usage("PAIRS");
	pairs = count(argv[1]);
	ready();
	for (unsigned long i = 0; i < pairs; i++) {
		void *at = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (at == MAP_FAILED || munmap(at, PAGE))
			die("cannot map and unmap a page: %s", strerror(errno));
	}
	fact("pairs", "%lu", pairs);
	done();
	return 0;
}
