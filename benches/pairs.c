/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * pairs COUNT [THREADS]: malloc and free of 64 bytes, COUNT times in each of THREADS threads (1),
 * from eight functions deep. Prints the nanoseconds of a pair. The protocol of
 * tests/workload/workload.h holds the program until the tool beside it is ready.
 */
#include "bench.h"

#include <pthread.h>

/*
 * Warm-up before the measurement, for tools that do more at their start: pairs, and microseconds to
 * wait.
 */
#define WARM_UP_PAIRS 1009
#define WARM_UP_US    500000

static pthread_barrier_t barrier;

STEP static void innermost(void)
{
	for (unsigned long i = 0; i < operations; i++) {
		void *volatile block = malloc(64);

		free(block);
	}
}

static void *thread(void *unused)
{
	pthread_barrier_wait(&barrier);
	level1();
	return unused;
}

static double nanoseconds_of(unsigned long threads)
{
	pthread_t others[threads];
	double start;

	if (pthread_barrier_init(&barrier, NULL, threads))
		die("cannot make a barrier");
	for (unsigned long i = 1; i < threads; i++)
		if (pthread_create(&others[i], NULL, thread, NULL))
			die("cannot start a thread");
	pthread_barrier_wait(&barrier);
	start = now();
	level1();
	for (unsigned long i = 1; i < threads; i++)
		pthread_join(others[i], NULL);
	return now() - start;
}

int main(int argc, char **argv)
{
	unsigned long threads = 1;

	if (argc == 3)
		threads = count(argv[2]);
	if (argc < 2 || argc > 3 || !threads)
		usage("COUNT [THREADS]");
	ready();
	operations = WARM_UP_PAIRS;
	level1();
	usleep(WARM_UP_US);
	operations = count(argv[1]);
	fact("ns", "%.1f", nanoseconds_of(threads) / operations);
	done();
	return 0;
}
