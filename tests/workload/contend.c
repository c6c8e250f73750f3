// SPDX-License-Identifier: BSD-2-Clause
/*
 * Operations from many threads at once, more than there are CPUs: THREADS of them,
 * started before "ready", do COUNT operations each.
 *
 * fault PATH: a major fault each, on pages of a file, of which each thread has its own
 *             part, without read-ahead; PATH as in file.c
 * touch:      a minor fault each, on new memory
 * brk:        ask for the end of the heap
 * mmap:       map no bytes (length 0), which fails
 * shmget:     look for a segment that does not exist
 *
 * facts: operations (= THREADS * COUNT), minor, major
 */
#include "team.h"
#include <sys/shm.h>

#define KEY 0x6d656d74 /* nobody's */

static unsigned long each;
static void (*operation)(char *at);
static char *memory;

static void fault(char *at)
{
	*(volatile char *)at;
}

static void touch(char *at)
{
	*(volatile char *)at = 1;
}

static void ask_brk(char *at)
{
	(void)at;
	syscall(SYS_brk, 0);
}

static void map_nothing(char *at)
{
	(void)at;
	if (syscall(SYS_mmap, 0, 0, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != -1)
		die("a mapping of no length was made");
}

static void look_for_segment(char *at)
{
	(void)at;
	if (shmget(KEY, 0, 0) != -1)
		die("there is a segment %#x", KEY);
}

STEP static void *work(void *number)
{
	unsigned long first = (unsigned long)number * each;

	pthread_barrier_wait(&go);
	pthread_barrier_wait(&go);
	for (unsigned long i = 0; i < each; i++)
		operation(memory + (first + i) * PAGE);
	pthread_barrier_wait(&over);
	return NULL;
}

static void map_file(const char *path, unsigned long pages)
{
	int fd = open(path, O_CREAT | O_RDWR | O_TRUNC, 0600);

	if (fd < 0)
		die("cannot make %s: %s", path, strerror(errno));
	fill_file(fd, path, pages);
	memory = mmap(NULL, pages * PAGE, PROT_READ, MAP_SHARED, fd, 0);
	if (memory == MAP_FAILED)
		die("cannot map %s: %s", path, strerror(errno));
	refuse_huge_pages(memory, pages * PAGE);
	if (madvise(memory, pages * PAGE, MADV_RANDOM))
		die("MADV_RANDOM: %s", strerror(errno));
	drop_from_cache(fd, memory, pages, path);
}

int main(int argc, char **argv)
{
	struct faults before, after;
	const char *kind, *path = NULL;
	unsigned long n;

	if (argc < 4 || argc > 5)
		usage("THREADS COUNT fault|touch|brk|mmap|shmget [PATH]");
	n = count(argv[1]);
	each = count(argv[2]);
	kind = argv[3];
	start_team(n, work);
	if (!strcmp(kind, "fault") && argc == 5) {
		operation = fault;
		path = argv[4];
		map_file(path, n * each);
	} else if (!strcmp(kind, "touch")) {
		operation = touch;
		memory = map_pages(n * each);
	} else if (!strcmp(kind, "brk")) {
		operation = ask_brk;
	} else if (!strcmp(kind, "mmap")) {
		operation = map_nothing;
	} else if (!strcmp(kind, "shmget")) {
		operation = look_for_segment;
	} else {
		usage("THREADS COUNT fault|touch|brk|mmap|shmget [PATH]");
	}
	before = faults_now();
	ready();
	pthread_barrier_wait(&go);
	pthread_barrier_wait(&over);
	after = faults_now();
	fact("operations", "%lu", n * each);
	fact_faults(before, after);
	done();
	if (path)
		unlink(path);
	return 0;
}
