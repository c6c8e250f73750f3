/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * maps COUNT WORK: mmap(2) and munmap(2) of one page, COUNT times, and WORK nanoseconds of
 * something else after each. Prints the nanoseconds of a pair with its WORK.
 */
#include "bench.h"

static unsigned long work_ns;

STEP static void innermost(void)
{
	for (unsigned long i = 0; i < operations; i++) {
		void *at = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (at == MAP_FAILED || munmap(at, PAGE))
			die("cannot map and unmap a page: %s", strerror(errno));
		if (work_ns)
			for (double begin = now(); now() - begin < work_ns;)
				;
	}
}

int main(int argc, char **argv)
{
	if (argc != 3)
		usage("COUNT WORK");
	work_ns = count(argv[2]);
	return bench(2, argv);
}
