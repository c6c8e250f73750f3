/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * A program that replaces its code by a copy in memory of no file, as programs do to run in huge
 * pages. Two other threads allocate and free meanwhile (not with "mmap", for which code is missing
 * for a moment).
 *
 *	copies COUNT SIZE mremap   moves the copy over the code
 *	copies COUNT SIZE mmap     maps memory over the code, and copies the copy to it
 *	copies COUNT SIZE memfd    maps the copy, in a file in memory, over the code
 *
 * Leaks COUNT blocks of SIZE bytes first, says "done", and copies at the next line, some
 * microseconds later. Then allocates and frees for a while, leaks COUNT blocks more, and says
 * "done".
 */
#include "workload.h"

#include <pthread.h>

#ifdef STATIC
#define take malloc
#define give free
#else
/*
 * An allocator in the program itself, so that the code that is copied is probed. The first blocks
 * are never used again.
 */
#define take   je_malloc
#define give   je_free
#define BLOCK  8192UL
#define FIRST  4096UL
#define OTHERS 65536UL

static char pool[(FIRST + OTHERS) * BLOCK];
static unsigned long taken;

STEP void *je_malloc(size_t size)
{
	unsigned long number = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED);

	if (size > BLOCK)
		return NULL;
	return pool + (number < FIRST ? number : FIRST + number % OTHERS) * BLOCK;
}

STEP void je_free(void *block)
{
	KEEP(block);
}
#endif

static unsigned long blocks, size;
static void *volatile kept;
static volatile bool over;

STEP static void leak_copies(void)
{
	for (unsigned long i = 0; i < blocks; i++)
		kept = take(size);
}

STEP static void churn(unsigned long times)
{
	for (unsigned long i = 0; i < times; i++) {
		void *block = take(size);

		KEEP(block);
		give(block);
	}
}

static void *allocate(void *unused)
{
	(void)unused;
	while (!over)
		churn(1);
	return NULL;
}

struct code {
	char *start;
	size_t bytes;
};

/* Returns the program's own code. */
static struct code own_code(void)
{
	static char maps[1 << 16];
	unsigned long here = (unsigned long)own_code, start, end;
	int file = open("/proc/self/maps", O_RDONLY), length = 0, got;

	while ((got = read(file, maps + length, sizeof(maps) - 1 - length)) > 0)
		length += got;
	close(file);
	for (char *line = maps; line && *line; line = strchr(line, '\n')) {
		line += *line == '\n';
		if (sscanf(line, "%lx-%lx", &start, &end) == 2 && here >= start && here < end)
			return (struct code){ (char *)start, end - start };
	}
	die("the code is not mapped");
}

/* All that replaces the code is outside of it, and calls nothing in it. */
__attribute__((section("outside"), aligned(4096), noinline)) static long
replace(struct code code, char *copy, void *(*map)(void *, size_t, int, int, int, off_t),
	void *(*copy_to)(void *, const void *, size_t))
{
	void *at = map(code.start, code.bytes, PROT_READ | PROT_WRITE | PROT_EXEC,
		       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);

	copy_to(at, copy, code.bytes);
	return at == code.start;
}

static void copy_code(const char *way)
{
	struct code code = own_code();
	char *copy = NULL;
	int file;

	if (!strcmp(way, "memfd")) {
		file = memfd_create("code", 0);
		if (write(file, code.start, code.bytes) != (ssize_t)code.bytes ||
		    mmap(code.start, code.bytes, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_FIXED,
			 file, 0) != code.start)
			die("cannot map a copy");
		return;
	}
	copy = mmap(NULL, code.bytes, PROT_READ | PROT_WRITE | PROT_EXEC,
		    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	memcpy(copy, code.start, code.bytes);
	if (!strcmp(way, "mremap")) {
		if (mremap(copy, code.bytes, code.bytes, MREMAP_MAYMOVE | MREMAP_FIXED,
			   code.start) != code.start)
			die("cannot move a copy");
		return;
	}
	code.bytes = (char *)replace - code.start;
	if (!replace(code, copy, mmap, memcpy))
		die("cannot map over the code");
}

int main(int argc, char **argv)
{
	pthread_t others[2];
	bool alone;

	if (argc != 4)
		usage("COUNT SIZE mremap|mmap|memfd");
	blocks = count(argv[1]);
	size = count(argv[2]);
	alone = !strcmp(argv[3], "mmap");
	ready();
	leak_copies();
	done();
	for (int i = 0; i < 2 && !alone; i++)
		if (pthread_create(&others[i], NULL, allocate, NULL))
			die("no thread");
	churn(getpid() % 1000);
	copy_code(argv[3]);
	churn(1000);
	over = true;
	for (int i = 0; i < 2 && !alone; i++)
		pthread_join(others[i], NULL);
	leak_copies();
	done();
	return 0;
}
