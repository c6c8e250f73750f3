/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Threads that are all started before "ready", and then work at the same time. Each passes `go`
 * twice before it works: when it has started, and when the test is ready. It passes `over` once,
 * when it has worked.
 */
#ifndef TEAM_H
#define TEAM_H

#include "workload.h"
#include <pthread.h>

#define MOST	   256
#define TEAM_STACK (64 << 10)

static pthread_barrier_t go, over;

/* Starts `n` threads, each with its number as the argument, and returns when all have started. */
static inline void start_team(unsigned long n, void *(*work)(void *number))
{
	pthread_attr_t attributes;

	if (n > MOST)
		die("at most %d threads", MOST);
	pthread_barrier_init(&go, NULL, n + 1);
	pthread_barrier_init(&over, NULL, n + 1);
	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, TEAM_STACK);
	for (unsigned long i = 0; i < n; i++) {
		pthread_t thread;
		int error = pthread_create(&thread, &attributes, work, (void *)i);

		if (error)
			die("cannot start thread %lu: %s; see ulimit -u", i, strerror(error));
	}
	pthread_barrier_wait(&go);
	/* Settles this thread alone: the other threads continue to run on all CPUs. */
	settle();
}

#endif
