// SPDX-License-Identifier: BSD-2-Clause
/*
 * stopwatch WHAT COUNT: a process that a tool stops, and that measures for how long. WHAT is
 *
 *	tables   COUNT GB of address space are mapped to the zero page: there are page tables, and
 *	         almost no memory
 *	threads  there are COUNT threads
 *	memory   COUNT MB are written
 *
 * A thread with real-time priority, if that is permitted, reads the clock all the time, from
 * "ready" to "go". Another thread maps and unmaps memory.
 *
 * facts: gap_us, the longest time between two readings of the clock, in microseconds;
 *        lock_us, the longest time that it took to map memory
 */
#include "workload.h"
#include <pthread.h>
#include <time.h>

#define GB (1UL << 30)

static volatile bool is_over;
static unsigned long longest_gap, longest_map;

static unsigned long now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000UL + time.tv_nsec / 1000;
}

static void take_priority(void)
{
	struct sched_param parameters = { .sched_priority = 2 };

	/* Without privilege, the longest gap also has what other processes take. */
	sched_setscheduler(0, SCHED_FIFO, &parameters);
}

static void rest(void)
{
	struct timespec time = { .tv_nsec = 200000 };

	nanosleep(&time, NULL);
}

static void *read_clock(void *unused)
{
	unsigned long last = now();

	take_priority();
	while (!is_over) {
		unsigned long time = now();

		if (time - last > longest_gap)
			longest_gap = time - last;
		last = time;
		rest();
	}
	return unused;
}

static void *map_memory(void *unused)
{
	take_priority();
	while (!is_over) {
		unsigned long begin = now();
		char *page = map_pages(1);

		munmap(page, PAGE);
		if (now() - begin > longest_map)
			longest_map = now() - begin;
		rest();
	}
	return unused;
}

static void *wait_for_ever(void *unused)
{
	for (;;)
		pause();
	return unused;
}

static pthread_t start(void *(*work)(void *))
{
	pthread_attr_t attributes;
	pthread_t thread;
	int error;

	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, 32 << 10);
	error = pthread_create(&thread, &attributes, work, NULL);
	if (error)
		die("cannot start a thread: %s; see ulimit -u", strerror(error));
	return thread;
}

static void map_tables(unsigned long count)
{
	for (unsigned long i = 0; i < count; i++) {
		char *memory = map_pages(GB / PAGE);

		/* Kernels before 5.14 have no MADV_POPULATE_READ. */
		if (madvise(memory, GB, 22))
			read_pages(memory, GB / PAGE, PAGE);
	}
}

int main(int argc, char **argv)
{
	pthread_t clock, mapper;
	unsigned long number;

	if (argc != 3)
		usage("tables|threads|memory COUNT");
	number = count(argv[2]);
	if (!strcmp(argv[1], "tables")) {
		map_tables(number);
	} else if (!strcmp(argv[1], "threads")) {
		for (unsigned long i = 0; i < number; i++)
			start(wait_for_ever);
	} else if (!strcmp(argv[1], "memory")) {
		write_pages(map_pages((number << 20) / PAGE), (number << 20) / PAGE, PAGE);
	} else {
		usage("tables|threads|memory COUNT");
	}
	clock = start(read_clock);
	mapper = start(map_memory);
	ready();
	is_over = true;
	pthread_join(clock, NULL);
	pthread_join(mapper, NULL);
	fact("gap_us", "%lu", longest_gap);
	fact("lock_us", "%lu", longest_map);
	done();
	return 0;
}
