/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * swap attack FILE VICTIM OPENS: maps FILE executable, and replaces it by a symbolic
 * link to VICTIM once it was opened OPENS times by a process that looks at it.
 * Facts: "swapped" 0 or 1.
 *
 * swap victim LIBRARY COUNT: calls work() of LIBRARY COUNT times. Facts: "wrong",
 * the number of wrong results.
 */
#include "workload.h"

#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <sys/inotify.h>

static const char *file, *replacement;
static unsigned long opens;
static volatile int swapped;

static void *replace(void *nothing)
{
	char events[4096];
	int watch = inotify_init1(0);

	if (watch < 0 || inotify_add_watch(watch, file, IN_OPEN) < 0)
		die("cannot watch %s: %s", file, strerror(errno));
	swapped = -1;
	while (opens) {
		long length = read(watch, events, sizeof(events));

		for (long at = 0; at < length && opens; opens--)
			at += sizeof(struct inotify_event) +
			      ((struct inotify_event *)(events + at))->len;
	}
	if (unlink(file) || symlink(replacement, file))
		die("cannot replace %s: %s", file, strerror(errno));
	swapped = 1;
	return nothing;
}

static void attack(void)
{
	int fd = open(file, O_RDONLY);
	pthread_t thread;

	if (fd < 0 || mmap(NULL, 4 * PAGE, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0) == MAP_FAILED)
		die("cannot map %s: %s", file, strerror(errno));
	close(fd);
	if (pthread_create(&thread, NULL, replace, NULL))
		die("cannot start a thread");
	while (!swapped)
		sched_yield();
	ready();
	fact("swapped", "%d", swapped == 1);
	done();
}

static void be_victim(const char *library, unsigned long times)
{
	void *loaded = dlopen(library, RTLD_NOW);
	long (*work)(long) = loaded ? (long (*)(long))dlsym(loaded, "work") : NULL;
	unsigned long wrong = 0;

	if (!work)
		die("%s", dlerror());
	ready();
	for (unsigned long i = 0; i < times; i++)
		wrong += work(i) != (long)(i ^ 0x1122334455667788);
	fact("wrong", "%lu", wrong);
	done();
}

int main(int argc, char **argv)
{
	if (argc == 5 && !strcmp(argv[1], "attack")) {
		file = argv[2];
		replacement = argv[3];
		opens = count(argv[4]);
		attack();
	} else if (argc == 4 && !strcmp(argv[1], "victim")) {
		be_victim(argv[2], count(argv[3]));
	} else {
		usage("attack FILE VICTIM OPENS | victim LIBRARY COUNT");
	}
	return 0;
}
