/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Blocks that are no longer used, beside blocks that are.
 *
 *	idle COLD WARM HOT PAGES
 *
 * COLD blocks of 8000 bytes are written once. WARM blocks of 9000 are written once more
 * when the work is to be done. HOT blocks of 10000 are read all the time by a thread that
 * makes no system call. Blocks of another size are between them, so that no page has blocks
 * of two kinds. One block of 5000 is lost. PAGES is small or huge.
 */
#define _GNU_SOURCE
#include <malloc.h>
#include <pthread.h>
#include <sys/prctl.h>
#include "workload.h"
#include "wipe.h"

#define MOST	2000
#define TOP_PAD (128 << 20)

enum { COLD, WARM, HOT, KINDS };

static const size_t sizes[KINDS] = { 8000, 9000, 10000 };
static char *blocks[KINDS][MOST];
static char *volatile between[KINDS + 1];
static void *volatile first;
static unsigned long counts[KINDS];

/* Makes all later allocations use huge pages, where the kernel has some. */
static void want_huge_pages(void)
{
	char *end;

	if (!mallopt(M_TOP_PAD, TOP_PAD) || !(first = malloc(1)))
		die("no memory");
	end = sbrk(0);
	if (madvise((char *)((size_t)(end - TOP_PAD + HUGE_PAGE) & ~(HUGE_PAGE - 1)),
		    TOP_PAD - HUGE_PAGE, MADV_HUGEPAGE))
		die("no huge pages: %s", strerror(errno));
}

static char *written(size_t size)
{
	char *block = malloc(size);

	if (!block)
		die("no memory");
	return memset(block, 1, size);
}

static void use(int kind)
{
	for (unsigned long i = 0; i < counts[kind]; i++) {
		volatile char *block = blocks[kind][i];

		for (size_t at = 0; at < sizes[kind]; at += PAGE / 2)
			(void)block[at];
		(void)block[sizes[kind] - 1];
	}
}

static void *use_for_ever(void *nothing)
{
	(void)nothing;
	for (;;)
		use(HOT);
	return NULL;
}

static STEP void lose(void)
{
	written(5000);
}

static unsigned long huge_kilobytes(void)
{
	FILE *smaps = fopen("/proc/self/smaps", "r");
	unsigned long sum = 0, one;
	char line[4096];

	while (smaps && fgets(line, sizeof(line), smaps))
		if (sscanf(line, "AnonHugePages: %lu kB", &one) == 1)
			sum += one;
	return sum;
}

int main(int argc, char **argv)
{
	pthread_t thread;
	bool huge;

	if (argc != 5)
		usage("COLD WARM HOT small|huge");
	huge = !strcmp(argv[4], "huge");
	if (!mallopt(M_MMAP_THRESHOLD, 1 << 30))
		die("mallopt");
	if (huge)
		want_huge_pages();
	else if (prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0))
		die("cannot do without huge pages: %s", strerror(errno));
	for (int kind = 0; kind <= KINDS; kind++) {
		between[kind] = written(huge ? 2 * HUGE_PAGE : 5 * PAGE);
		if (kind == KINDS)
			break;
		counts[kind] = count(argv[1 + kind]);
		if (counts[kind] > MOST)
			die("too many blocks");
		for (unsigned long i = 0; i < counts[kind]; i++)
			blocks[kind][i] = written(sizes[kind]);
	}
	lose();
	fact("huge_kb", "%lu", huge_kilobytes());
	if (pthread_create(&thread, NULL, use_for_ever, NULL))
		die("no thread");
	wipe();
	ready();
	use(WARM);
	done();
	return 0;
}
