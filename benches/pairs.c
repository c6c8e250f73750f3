/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * pairs COUNT: malloc and free of 64 bytes, COUNT times, from eight functions
 * deep. Prints the nanoseconds of a pair. tests/workload/workload.h has the
 * protocol: it is held until the tool beside it is ready.
 */
#include "../tests/workload/workload.h"

#include <time.h>

static unsigned long pairs;

STEP static void innermost(void)
{
	for (unsigned long i = 0; i < pairs; i++) {
		void *volatile block = malloc(64);

		free(block);
	}
}

#define LEVEL(name, below)                                                                         \
	STEP static void name(void)                                                                \
	{                                                                                          \
		below();                                                                           \
		__asm__ volatile("");                                                              \
	}

LEVEL(level7, innermost)
LEVEL(level6, level7)
LEVEL(level5, level6)
LEVEL(level4, level5)
LEVEL(level3, level4)
LEVEL(level2, level3)
LEVEL(level1, level2)

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1e9 + time.tv_nsec;
}

int main(int argc, char **argv)
{
	if (argc != 2)
		usage("COUNT");
	pairs = count(argv[1]);
	ready();

	double start = now();

	level1();
	fact("ns", "%.1f", (now() - start) / pairs);
	done();
	return 0;
}
