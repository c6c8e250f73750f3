/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * heap BLOCKS BYTES: allocates BLOCKS blocks of BYTES bytes, each with the address of a random
 * block in every eighth word. After each line of input, prints "gap=NS one=NS copy=NS": the longest
 * time since the line before in which a thread that watches the clock did not run; and the time of
 * a copy of as much memory, by one call of memcpy(), and by a thread on each CPU.
 */
#include "../tests/workload/workload.h"
#include <pthread.h>
#include <time.h>

static volatile unsigned long gap;
static unsigned long threads;
/* Global, so that the blocks stay reachable for as long as the program runs. */
static void ***volatile block;

struct part {
	char *to, *from;
	unsigned long bytes;
};

static unsigned long now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000UL + time.tv_nsec;
}

static void *tick(void *unused)
{
	unsigned long last = now();

	for (;;) {
		unsigned long time = now();

		if (time - last > gap)
			gap = time - last;
		last = time;
		usleep(50);
	}
	return unused;
}

static void *copy(void *argument)
{
	struct part *part = argument;

	memcpy(part->to, part->from, part->bytes);
	return NULL;
}

/* Returns the nanoseconds that the threads take to copy between resident buffers. */
static unsigned long copied(char *to, char *from, unsigned long bytes)
{
	pthread_t thread[threads];
	struct part part[threads];
	unsigned long start = now();

	for (unsigned long i = 0; i < threads; i++) {
		unsigned long begin = bytes / threads * i;

		part[i] = (struct part){ to + begin, from + begin, bytes / threads };
		pthread_create(&thread[i], NULL, copy, &part[i]);
	}
	for (unsigned long i = 0; i < threads; i++)
		pthread_join(thread[i], NULL);
	return now() - start;
}

/*
 * Returns resident memory, in huge pages if the kernel has some, as memleak's own buffer is. The
 * buffer is no block of the heap.
 */
static char *buffer(unsigned long bytes)
{
	char *buffer =
	    mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (buffer == MAP_FAILED)
		die("no memory: %s", strerror(errno));
	madvise(buffer, bytes, MADV_HUGEPAGE);
	memset(buffer, 1, bytes);
	return buffer;
}

int main(int argc, char **argv)
{
	unsigned long blocks, words, bytes;
	pthread_t ticker;

	if (argc != 3)
		usage("BLOCKS BYTES");
	blocks = count(argv[1]);
	words = count(argv[2]) / sizeof(void *);
	bytes = blocks * words * sizeof(void *);
	threads = sysconf(_SC_NPROCESSORS_ONLN);
	block = malloc(blocks * sizeof(*block));
	for (unsigned long i = 0; i < blocks; i++)
		block[i] = calloc(words, sizeof(void *));
	for (unsigned long i = 0; i < blocks; i++)
		for (unsigned long at = 0; at < words; at++)
			block[i][at] =
			    at % 8 ? (void *)(at + 1) : block[(unsigned long)random() % blocks];
	pthread_create(&ticker, NULL, tick, NULL);
	ready();
	for (;;) {
		unsigned long seen = gap, one, all;
		char *from = buffer(bytes), *to = buffer(bytes);

		one = now();
		memcpy(to, from, bytes);
		one = now() - one;
		all = copied(to, from, bytes);
		munmap(from, bytes);
		munmap(to, bytes);
		dprintf(1, "gap=%lu one=%lu copy=%lu\n", seen, one, all);
		gap = 0;
		wait_for_line();
	}
}
