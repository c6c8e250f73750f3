// SPDX-License-Identifier: BSD-2-Clause
/*
 * mapped ACTION FILE CALLS: as an unprivileged user, maps FILE executable, does
 * something to it, and makes CALLS calls of brk(2).
 *
 * ACTION, after FILE was mapped:
 *	none	leaves it
 *	fifo	removes it, and makes a FIFO where a tool looks that takes the
 *		text of /proc/PID/maps, "NAME (deleted)", for a path
 *	link=T	as fifo, but makes a symbolic link to T
 *	shrink	truncates it to a page as soon as somebody opens it: a process that
 *		reads it through mmap(2) gets SIGBUS
 *	flip	writes random bytes to it and restores the old ones, over and over
 *
 * facts: brk (calls), seen (number of opens of the file, for shrink)
 */
#include "hostile.h"
#include <pthread.h>
#include <sys/inotify.h>

static const char *file;
static volatile unsigned long seen;

static void *cut_when_opened(void *inotify)
{
	char events[4096];

	while (read(*(int *)inotify, events, sizeof(events)) > 0) {
		seen++;
		if (truncate(file, PAGE))
			die("cannot cut %s: %s", file, strerror(errno));
	}
	return NULL;
}

static void *flip(void *size_of_file)
{
	size_t size = *(size_t *)size_of_file;
	int fd = open(file, O_RDWR | O_CLOEXEC);
	char *bytes = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	unsigned long x = 88172645463325252UL;

	if (bytes == MAP_FAILED)
		die("cannot map %s: %s", file, strerror(errno));
	for (;;) {
		/* All of the file but the magic number is changed. The tables are at the end. */
		size_t at[64];
		char before[64];

		for (int i = 0; i < 64; i++) {
			x ^= x << 13, x ^= x >> 7, x ^= x << 17;
			at[i] = i % 2 ? size - 1 - x % (size / 8) : 16 + x % (size - 16);
			before[i] = bytes[at[i]];
			bytes[at[i]] = x >> 32;
		}
		for (int i = 63; i >= 0; i--)
			bytes[at[i]] = before[i];
	}
}

static void start(void *(*run)(void *), void *with)
{
	pthread_t thread;

	if (pthread_create(&thread, NULL, run, with))
		die("cannot start a thread");
}

int main(int argc, char **argv)
{
	static int inotify;
	static size_t size;
	char gone[4096];
	struct stat status;

	if (argc != 4)
		usage("ACTION FILE CALLS");
	const char *action = argv[1];
	unsigned long calls = count(argv[3]);

	file = argv[2];
	drop_root();
	int fd = open(file, O_RDONLY | O_CLOEXEC);

	if (fd < 0 || fstat(fd, &status) ||
	    mmap(NULL, status.st_size, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0) == MAP_FAILED)
		die("cannot map %s: %s", file, strerror(errno));
	close(fd);
	size = status.st_size;
	snprintf(gone, sizeof(gone), "%s (deleted)", file);
	if (!strcmp(action, "fifo")) {
		if (unlink(file) || mkfifo(gone, 0644))
			die("cannot make a FIFO: %s", strerror(errno));
	} else if (!strncmp(action, "link=", 5)) {
		if (unlink(file) || symlink(action + 5, gone))
			die("cannot make a link: %s", strerror(errno));
	} else if (!strcmp(action, "shrink")) {
		inotify = inotify_init1(IN_CLOEXEC);
		if (inotify < 0 || inotify_add_watch(inotify, file, IN_OPEN) < 0)
			die("cannot watch %s: %s", file, strerror(errno));
		start(cut_when_opened, &inotify);
	} else if (!strcmp(action, "flip")) {
		start(flip, &size);
	} else if (strcmp(action, "none")) {
		die("'%s' is no action", action);
	}
	ready();
	for (unsigned long i = 0; i < calls; i++)
		syscall(SYS_brk, 0);
	fact("brk", "%lu", calls);
	fact("seen", "%lu", seen);
	done();
	return 0;
}
