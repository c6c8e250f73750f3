/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * A process whose main thread ends, by pthread_exit(), while another thread goes on.
 *
 *	leaderless COUNT SIZE           the main thread has ended when the program is ready; the
 *	                                other thread leaks COUNT blocks of SIZE bytes
 *	leaderless COUNT SIZE LIBRARY   the main thread ends at the first line; the other thread
 *	                                loads LIBRARY, says "done", leaks COUNT blocks of SIZE bytes
 *	                                of the library's je_malloc, and says "done" once more
 *
 * A block of HELD bytes makes the process one of the machine's largest.
 */
#include "workload.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>

#define HELD (7UL << 20)

static unsigned long blocks, size;
static const char *path;
static pthread_t first;
static void *volatile held, *volatile kept;

STEP static void leak_leaderless(void *(*take)(unsigned long))
{
	for (unsigned long i = 0; i < blocks; i++)
		kept = take(size);
}

/* Waits until the kernel has released the main thread's memory: its size is 0 then. */
static void wait_for_end_of_main(void)
{
	char path[64], size = '1';

	snprintf(path, sizeof(path), "/proc/%d/statm", getpid());
	while (size != '0') {
		int file = open(path, O_RDONLY);

		if (file < 0 || read(file, &size, 1) != 1)
			die("cannot read %s", path);
		close(file);
		sched_yield();
	}
}

static void *other(void *unused)
{
	void *(*take)(unsigned long) = malloc;
	void *library;

	(void)unused;
	if (path)
		ready();
	if (path)
		pthread_kill(first, SIGUSR1);
	wait_for_end_of_main();
	if (path) {
		library = dlopen(path, RTLD_NOW);
		if (!library)
			die("%s", dlerror());
		take = (void *(*)(unsigned long))dlsym(library, "je_malloc");
		say("done\n", 5);
		wait_for_line();
	} else {
		ready();
	}
	leak_leaderless(take);
	done();
	_exit(0);
}

int main(int argc, char **argv)
{
	pthread_t second;
	sigset_t end;
	int signal;

	if (argc != 3 && argc != 4)
		usage("COUNT SIZE [LIBRARY]");
	blocks = count(argv[1]);
	size = count(argv[2]);
	path = argv[3];
	first = pthread_self();
	held = malloc(HELD);
	memset(held, 1, HELD);
	sigemptyset(&end);
	sigaddset(&end, SIGUSR1);
	pthread_sigmask(SIG_BLOCK, &end, NULL);
	if (pthread_create(&second, NULL, other, NULL))
		die("no thread");
	if (path)
		sigwait(&end, &signal);
	pthread_exit(NULL);
}
