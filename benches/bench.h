/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Shared code of the benchmark programs: a clock, a stack, and the protocol of
 * tests/workload/workload.h, which holds a program until the tool beside it is ready.
 *
 * A program defines innermost(), which runs `operations` of the operations that are measured.
 */
#ifndef BENCH_H
#define BENCH_H

#include "../tests/workload/workload.h"

#include <time.h>

static unsigned long operations;
STEP static void innermost(void);

#define LEVEL(name, below)                                                                         \
	STEP static void name(void)                                                                \
	{                                                                                          \
		below();                                                                           \
		__asm__ volatile("");                                                              \
	}

/* The stack is eight functions deep: level1() to level7(), and innermost(). */
LEVEL(level7, innermost)
LEVEL(level6, level7)
LEVEL(level5, level6)
LEVEL(level4, level5)
LEVEL(level3, level4)
LEVEL(level2, level3)
LEVEL(level1, level2)

static inline double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1e9 + time.tv_nsec;
}

/*
 * Runs all of main() for a program whose one argument is the number of operations. States the fact
 * ns, the nanoseconds of an operation.
 */
static inline int bench(int argc, char **argv)
{
	double start;

	if (argc != 2)
		usage("COUNT");
	operations = count(argv[1]);
	settle();
	ready();
	start = now();
	level1();
	fact("ns", "%.1f", (now() - start) / operations);
	done();
	return 0;
}

#endif /* BENCH_H */
