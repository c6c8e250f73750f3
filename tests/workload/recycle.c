// SPDX-License-Identifier: BSD-2-Clause
/*
 * recycle: from before "ready" on, a thread allocates and frees one block after the other, with
 * each function that allocates, so that they have the same address. The block is larger than those
 * that glibc keeps for each thread, of which calloc() takes none.
 *
 * facts: blocks
 */
#include "workload.h"
#include <pthread.h>
#include <stdatomic.h>

#define SIZE 4099

static atomic_bool ends;
static unsigned long blocks;

static void recycle(void *block)
{
	if (!block)
		die("no memory");
	KEEP(block);
	free(block);
	blocks++;
}

static void *work(void *unused)
{
	while (!atomic_load(&ends)) {
		recycle(malloc(SIZE));
		recycle(calloc(1, SIZE));
		recycle(realloc(NULL, SIZE));
		recycle(aligned_alloc(16, SIZE));
	}
	return unused;
}

int main(int argc, char **argv)
{
	pthread_t thread;
	int error;

	(void)argv;
	if (argc != 1)
		usage("");
	error = pthread_create(&thread, NULL, work, NULL);
	if (error)
		die("cannot start a thread: %s", strerror(error));
	ready();
	atomic_store(&ends, true);
	pthread_join(thread, NULL);
	fact("blocks", "%lu", blocks);
	done();
	return 0;
}
