/* SPDX-License-Identifier: BSD-2-Clause */
/* maps COUNT: mmap(2) and munmap(2) of one page, COUNT times. Prints the nanoseconds of a pair. */
#include "bench.h"

STEP static void innermost(void)
{
	for (unsigned long i = 0; i < operations; i++) {
		void *at = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (at == MAP_FAILED || munmap(at, PAGE))
			die("cannot map and unmap a page: %s", strerror(errno));
	}
}

int main(int argc, char **argv)
{
	return bench(argc, argv);
}
