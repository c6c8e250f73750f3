/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * depth COUNT DEPTH: malloc and free of 64 bytes, COUNT times, below DEPTH calls of one function.
 * Prints the nanoseconds of a pair, of the thread's own time. depth.py and Depth.java do the same.
 */
#include "bench.h"

static unsigned long deep;
static double taken;

static double thread_time(void)
{
	struct timespec time;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
	return time.tv_sec * 1e9 + time.tv_nsec;
}

STEP static void descend(unsigned long depth)
{
	double start;

	if (depth > 0) {
		descend(depth - 1);
		__asm__ volatile("");
		return;
	}
	start = thread_time();
	for (unsigned long i = 0; i < operations; i++) {
		void *volatile block = malloc(64);

		free(block);
	}
	taken = thread_time() - start;
}

STEP static void innermost(void)
{
	descend(deep);
	__asm__ volatile("");
}

int main(int argc, char **argv)
{
	if (argc != 3)
		usage("COUNT DEPTH");
	operations = count(argv[1]);
	deep = count(argv[2]);
	settle();
	ready();
	level1();
	fact("ns", "%.1f", taken / operations);
	done();
	return 0;
}
