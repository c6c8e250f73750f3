// SPDX-License-Identifier: BSD-2-Clause
/*
 * recycle THREADS: from before "ready" on, each thread allocates and frees one block after the
 * other, with each function that allocates, and no block twice. The threads have one arena: what
 * one frees, another is given at once, and threads wait for each other in the middle of calls. The
 * blocks are larger than those that glibc keeps for each thread. Every second thread has the name
 * "other".
 *
 * facts: blocks
 */
#include "workload.h"
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/prctl.h>

#define SIZE	    4099
#define MAX_THREADS 64

static atomic_bool ends;
static atomic_ulong blocks;

static void recycle(void *block)
{
	if (!block)
		die("no memory");
	KEEP(block);
	free(block);
}

static void *work(void *name)
{
	unsigned long done = 0;

	if (name)
		prctl(PR_SET_NAME, name);
	while (!atomic_load(&ends)) {
		recycle(malloc(SIZE));
		recycle(calloc(1, SIZE));
		recycle(realloc(NULL, SIZE));
		recycle(aligned_alloc(16, SIZE));
		done += 4;
	}
	atomic_fetch_add(&blocks, done);
	return NULL;
}

int main(int argc, char **argv)
{
	unsigned long count = argc == 2 ? strtoul(argv[1], NULL, 10) : 0;
	pthread_t threads[MAX_THREADS];
	int error;

	if (!count || count > MAX_THREADS)
		usage("THREADS");
	mallopt(M_ARENA_MAX, 1);
	for (unsigned long i = 0; i < count; i++) {
		error = pthread_create(&threads[i], NULL, work, i % 2 ? "other" : NULL);
		if (error)
			die("cannot start a thread: %s", strerror(error));
	}
	ready();
	atomic_store(&ends, true);
	for (unsigned long i = 0; i < count; i++)
		pthread_join(threads[i], NULL);
	fact("blocks", "%lu", blocks);
	done();
	return 0;
}
