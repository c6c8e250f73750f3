// SPDX-License-Identifier: BSD-2-Clause
/*
 * collapse COUNT: a thread calls malloc() COUNT times, DEPTH functions deep, on a stack of two
 * megabytes. All the time, another thread makes the kernel collapse this stack into one huge page,
 * and breaks the page up again. While the kernel does so, reading the stack means waiting.
 *
 * facts: collapses (huge pages that were made)
 */
#include "workload.h"

#include <pthread.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#define BYTES 1009
#define DEPTH 40
/* Size of each function's frame in bytes, so that a walk of the stack needs many reads. */
#define FRAME (16 << 10)

static unsigned long blocks;
static char *stack;
static volatile bool over;
static unsigned long collapses;

STEP static void leaf(void)
{
	for (unsigned long i = 0; i < blocks; i++) {
		char *block = malloc(BYTES);

		if (!block)
			die("no memory");
		*(volatile char *)block = 1;
	}
}

STEP static void descend(int depth)
{
	volatile char frame[FRAME];

	frame[0] = depth;
	if (depth == 0)
		leaf();
	else
		descend(depth - 1);
	frame[FRAME - 1] = frame[0];
}

static void *allocate(void *unused)
{
	descend(DEPTH);
	return unused;
}

/* The lowest page of the stack is not in use. Giving it back breaks the huge page up. */
static void *collapse(void *unused)
{
	while (!over) {
		if (madvise(stack, HUGE_PAGE, MADV_COLLAPSE) == 0)
			collapses++;
		if (madvise(stack, PAGE, MADV_DONTNEED))
			die("cannot give a page back: %s", strerror(errno));
	}
	return unused;
}

int main(int argc, char **argv)
{
	pthread_t allocator, collapser;
	pthread_attr_t attributes;
	char *memory;

	if (argc != 2)
		usage("COUNT");
	blocks = count(argv[1]);
	memory =
	    mmap(NULL, 2 * HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		die("no memory");
	stack = (char *)(((unsigned long)memory + HUGE_PAGE - 1) & -HUGE_PAGE);
	memset(stack, 1, HUGE_PAGE);
	if (madvise(stack, HUGE_PAGE, MADV_COLLAPSE))
		die("cannot make a huge page: %s; it takes Linux 6.1, and transparent huge pages",
		    strerror(errno));
	if (pthread_attr_init(&attributes) || pthread_attr_setstack(&attributes, stack, HUGE_PAGE))
		die("cannot give a thread its stack");
	ready();
	if (pthread_create(&collapser, NULL, collapse, NULL) ||
	    pthread_create(&allocator, &attributes, allocate, NULL))
		die("cannot start a thread");
	pthread_join(allocator, NULL);
	over = true;
	pthread_join(collapser, NULL);
	fact("collapses", "%lu", collapses);
	done();
	return 0;
}
