// SPDX-License-Identifier: BSD-2-Clause
/*
 * Threads: starts THREADS threads, named worker-0 and so on, before "ready". Then
 * each touches PAGES pages of its own at the same time as the others.
 *
 * facts: threads, pages (of each), minor (= threads * pages), major (= 0), tids,
 *        addrs (of the threads' pages, in the order of their names)
 */
#include "team.h"

static unsigned long pages;

static struct worker {
	pid_t tid;
	char *at;
} workers[MOST];

STEP static void *work(void *number)
{
	struct worker *worker = &workers[(unsigned long)number];
	char name[16];

	snprintf(name, sizeof(name), "worker-%lu", (unsigned long)number);
	pthread_setname_np(pthread_self(), name);
	worker->tid = syscall(SYS_gettid);
	pthread_barrier_wait(&go);
	pthread_barrier_wait(&go);
	write_pages(worker->at, pages, PAGE);
	pthread_barrier_wait(&over);
	return NULL;
}

int main(int argc, char **argv)
{
	struct faults before, after;
	unsigned long n;

	if (argc != 3)
		usage("THREADS PAGES");
	n = count(argv[1]);
	pages = count(argv[2]);
	start_team(n, work);
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
