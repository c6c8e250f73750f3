// SPDX-License-Identifier: BSD-2-Clause
/*
 * Threads: THREADS of them, named worker-0 and so on, started before "ready", then
 * each touching PAGES pages of its own at the same time as the others.
 *
 * facts: threads, pages (of each), minor (= threads * pages), major (= 0), tids,
 *        addrs (of the threads' pages, in the order of their names)
 */
#include "workload.h"
#include <pthread.h>

#define MOST  256
#define STACK (64 << 10)

static pthread_barrier_t go, over;
static unsigned long pages;

static struct worker {
	pid_t tid;
	char *at;
} workers[MOST];

STEP static void *work(void *argument)
{
	struct worker *worker = argument;
	char name[16];

	snprintf(name, sizeof(name), "worker-%d", (int)(worker - workers));
	pthread_setname_np(pthread_self(), name);
	worker->tid = syscall(SYS_gettid);
	/* Twice: all have told their tid; the memory is mapped and the test is ready. */
	pthread_barrier_wait(&go);
	pthread_barrier_wait(&go);
	write_pages(worker->at, pages, PAGE);
	pthread_barrier_wait(&over);
	return NULL;
}

int main(int argc, char **argv)
{
	struct faults before, after;
	pthread_attr_t attributes;
	unsigned long n;

	if (argc != 3)
		usage("THREADS PAGES");
	n = count(argv[1]);
	pages = count(argv[2]);
	if (n > MOST)
		die("at most %d threads", MOST);
	pthread_barrier_init(&go, NULL, n + 1);
	pthread_barrier_init(&over, NULL, n + 1);
	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, STACK);
	for (unsigned long i = 0; i < n; i++) {
		pthread_t thread;
		int error = pthread_create(&thread, &attributes, work, &workers[i]);

		if (error)
			die("cannot start thread %lu: %s; see ulimit -u", i, strerror(error));
	}
	pthread_barrier_wait(&go);
	/* Of this thread alone: the others go on running on all CPUs. */
	settle();
	for (unsigned long i = 0; i < n; i++)
		workers[i].at = map_pages(pages);
	before = faults_now();
	ready();
	pthread_barrier_wait(&go);
	pthread_barrier_wait(&over);
	after = faults_now();
	fact("threads", "%lu", n);
	fact("pages", "%lu", pages);
	fact_faults(before, after);
	add(" tids=");
	for (unsigned long i = 0; i < n; i++)
		add("%s%d", i ? "," : "", workers[i].tid);
	add(" addrs=");
	for (unsigned long i = 0; i < n; i++)
		add("%s%p", i ? "," : "", workers[i].at);
	done();
	return 0;
}
