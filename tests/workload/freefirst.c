/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * freefirst THREADS: the first call of each thread to the allocator is free(), of a block of the
 * main thread. For this call, glibc makes a cache and maps an arena. Then the thread maps a page
 * itself, and frees and allocates once more.
 *
 * facts: threads
 */
#include "workload.h"
#include <pthread.h>

#define MOST 64

static pthread_barrier_t go, over;

STEP static void map_own(void)
{
	map_pages(1);
}

static void *work(void *block)
{
	pthread_barrier_wait(&go);
	free(block);
	map_own();
	free(malloc(113));
	pthread_barrier_wait(&over);
	/* The blocks of a thread are freed when it ends. */
	pthread_barrier_wait(&over);
	return NULL;
}

int main(int argc, char **argv)
{
	unsigned long threads;

	if (argc != 2)
		usage("THREADS");
	threads = count(argv[1]);
	if (threads > MOST)
		die("at most %d threads", MOST);
	pthread_barrier_init(&go, NULL, threads + 1);
	pthread_barrier_init(&over, NULL, threads + 1);
	for (unsigned long i = 0; i < threads; i++) {
		pthread_t thread;
		int error = pthread_create(&thread, NULL, work, malloc(1009));

		if (error)
			die("cannot start a thread: %s", strerror(error));
	}
	ready();
	pthread_barrier_wait(&go);
	pthread_barrier_wait(&over);
	fact("threads", "%lu", threads);
	done();
	pthread_barrier_wait(&over);
	return 0;
}
