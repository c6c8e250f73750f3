/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Blocks over time, and over processes.
 *
 *   lives churn COUNT SIZE KEEP     COUNT blocks from churned() freed at once, KEEP from kept_on()
 *   lives twice COUNT               free_twice() frees COUNT blocks twice
 *   lives unknown COUNT             free_unknown() frees COUNT blocks from before it was ready
 *   lives grow SIZE COUNT...        grown() allocates the first COUNT blocks of SIZE bytes at the
 *                                   first line, says "done", and so on for each
 *   lives outgrow SIZE COUNT STEPS  grown() allocates COUNT blocks at each of STEPS lines; then
 *                                   malloc and free for half a second
 *   lives shrink SIZE COUNT KEEP    grown() allocates COUNT blocks; all but the last KEEP are freed
 *   lives climb COUNT SIZE          in_process() allocates COUNT blocks of SIZE bytes, and
 *                                   on_the_hill() as many of twice the size; all of the latter and
 *                                   half of the former are freed; then after_the_hill() allocates
 *   lives fork COUNT SIZE           in_process() leaks COUNT blocks; two children, which inherit
 *                                   and free these, leak twice and three times as many
 *   lives leave COUNT SIZE CHILDREN each of CHILDREN leaks COUNT blocks from in_process() and exits
 *   lives vfork COUNT               COUNT times, a child of vfork() frees a block of the parent's,
 *                                   the parent one of a child's, and both what they have themselves
 *   lives bursts MS                 for MS, malloc and free for 1/10000 of a second in each 1/300
 *   lives exec COUNT SIZE PROGRAM ARGUMENT...
 *                                   leaks COUNT blocks, and becomes another program
 */
#include "workload.h"

#include <time.h>

/* Leaked blocks stay reachable, so that no optimiser drops them. */
static void *volatile kept;

static unsigned long size;

STEP static void churned(void)
{
	kept = malloc(size);
	free(kept);
}

STEP static void kept_on(void)
{
	kept = malloc(size);
}

STEP static void free_unknown(void *block)
{
	free(block);
	__asm__ volatile(""); /* or the call would be a jump */
}

STEP static void free_twice(void)
{
	volatile unsigned long *block = malloc(64);

	free((void *)block);
	/* Clears the mark by which glibc knows that a block is free. */
	block[1] = 0;
	free((void *)block);
	/* The cache now has one address twice, which is one block too many. Takes both and
	 * forgets them. */
	kept = malloc(64);
	kept = malloc(64);
}

STEP static void grown(unsigned long count)
{
	for (unsigned long i = 0; i < count; i++)
		kept = malloc(size);
}

STEP static void churn_for(double seconds)
{
	struct timespec start, now;

	clock_gettime(CLOCK_MONOTONIC, &start);
	do {
		for (int i = 0; i < 100; i++)
			churned();
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while (now.tv_sec - start.tv_sec + (now.tv_nsec - start.tv_nsec) / 1e9 < seconds);
}

STEP static void shrink(unsigned long count, unsigned long keep)
{
	void **blocks = mmap(NULL, count * sizeof(void *), PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	for (unsigned long i = 0; i < count; i++) {
		grown(1);
		blocks[i] = kept;
	}
	for (unsigned long i = 0; i + keep < count; i++)
		free(blocks[i]);
}

STEP static void in_process(void **blocks, unsigned long count)
{
	for (unsigned long i = 0; i < count; i++)
		blocks[i] = malloc(size);
}

/* Frees all of the blocks but the first `keep`. */
static void thin_out(void **blocks, unsigned long count, unsigned long keep)
{
	for (unsigned long i = keep; i < count; i++)
		free(blocks[i]);
}

STEP static void on_the_hill(void **blocks, unsigned long count)
{
	for (unsigned long i = 0; i < count; i++)
		blocks[i] = malloc(2 * size);
}

STEP static void after_the_hill(void **blocks, unsigned long count)
{
	for (unsigned long i = 0; i < count; i++)
		blocks[i] = malloc(3 * size);
}

/* At the peak there are `count` blocks of in_process(), and as many of on_the_hill(), twice as
 * large. */
static void climb(unsigned long count)
{
	size_t bytes = count * sizeof(void *);
	void **base = calloc(3, bytes), **hill = base + count, **after = hill + count;

	in_process(base, count);
	on_the_hill(hill, count);
	thin_out(hill, count, 0);
	thin_out(base, count, count / 2);
	/* Another, lower peak. */
	after_the_hill(after, count / 2);
	thin_out(after, count / 2, 1);
}

/* The children wait on `hold` for the parent's end. */
STEP static void fork_children(unsigned long count)
{
	void **inherited = calloc(count, sizeof(void *));
	int told[2], hold[2];
	char byte;

	if (pipe(told) || pipe(hold))
		die("cannot make a pipe: %s", strerror(errno));
	in_process(inherited, count);
	for (unsigned long times = 2; times <= 3; times++) {
		pid_t child = fork();

		if (child < 0)
			die("cannot fork: %s", strerror(errno));
		if (!child) {
			void **own = calloc(times * count, sizeof(void *));

			for (unsigned long i = 0; i < count; i++)
				free(inherited[i]);
			in_process(own, times * count);
			close(hold[1]);
			if (write(told[1], "", 1) != 1 || read(hold[0], &byte, 1))
				_exit(1);
			_exit(0);
		}
		if (times == 2)
			fact("twice", "%d", child);
		else
			fact("thrice", "%d", child);
		if (read(told[0], &byte, 1) != 1)
			die("a child failed");
	}
}

static void leave_behind(unsigned long count, unsigned long children)
{
	for (unsigned long i = 0; i < children; i++) {
		void **own = calloc(count, sizeof(void *));
		pid_t child = fork();
		int status;

		if (child < 0)
			die("cannot fork: %s", strerror(errno));
		if (!child) {
			in_process(own, count);
			_exit(0);
		}
		if (waitpid(child, &status, 0) != child || status)
			die("a child failed");
		add("%s%d", i ? "," : " children=", child);
		free(own);
	}
}

/* Runs a child that uses its parent's memory. The child frees `frees`, and stores a new block
 * in `allocates`. */
STEP static void borrow(void *frees, void *volatile *allocates)
{
	pid_t child = vfork();

	if (child < 0)
		die("cannot fork: %s", strerror(errno));
	if (!child) {
		free(frees);
		*allocates = malloc(1009);
		free(malloc(499));
		_exit(0);
	}
	if (waitpid(child, NULL, 0) != child)
		die("a child failed");
}

static void share(unsigned long times)
{
	for (unsigned long i = 0; i < times; i++) {
		void *parents = malloc(97);
		void *volatile childs = malloc(1009);

		/* Frees the block, so that the child gets an address that was freed before. */
		free(childs);
		borrow(parents, &childs);
		free(childs);
		free(malloc(97));
	}
}

STEP static void burst(unsigned long ms)
{
	for (unsigned long i = 0; i < ms / 3; i++) {
		churn_for(0.0001);
		usleep(3000);
	}
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	unsigned long first = argc > 2 ? count(argv[2]) : 0;
	void **before = NULL;

	if (!strcmp(what, "unknown")) {
		before = calloc(first, sizeof(void *));
		for (unsigned long i = 0; i < first; i++)
			before[i] = malloc(100);
	}
	ready();
	if (!strcmp(what, "churn") && argc == 5) {
		size = count(argv[3]);
		for (unsigned long i = 0; i < first; i++)
			churned();
		for (unsigned long i = count(argv[4]); i; i--)
			kept_on();
	} else if (!strcmp(what, "twice") && argc == 3) {
		for (unsigned long i = 0; i < first; i++)
			free_twice();
	} else if (before && argc == 3) {
		for (unsigned long i = 0; i < first; i++)
			free_unknown(before[i]);
	} else if (!strcmp(what, "grow") && argc > 3) {
		size = first;
		for (int i = 3; i < argc; i++) {
			grown(count(argv[i]));
			if (i + 1 < argc) {
				say("done\n", 5);
				wait_for_line();
			}
		}
	} else if (!strcmp(what, "outgrow") && argc == 5) {
		size = first;
		for (unsigned long step = count(argv[4]); step; step--) {
			grown(count(argv[3]));
			churn_for(0.5);
			if (step > 1) {
				say("done\n", 5);
				wait_for_line();
			}
		}
	} else if (!strcmp(what, "shrink") && argc == 5) {
		size = first;
		shrink(count(argv[3]), count(argv[4]));
	} else if (!strcmp(what, "fork") && argc == 4) {
		size = count(argv[3]);
		fork_children(first);
	} else if (!strcmp(what, "leave") && argc == 5) {
		size = count(argv[3]);
		leave_behind(first, count(argv[4]));
	} else if (!strcmp(what, "vfork") && argc == 3) {
		share(first);
	} else if (!strcmp(what, "bursts") && argc == 3) {
		size = 64;
		burst(first);
	} else if (!strcmp(what, "climb") && argc == 4) {
		size = count(argv[3]);
		climb(first);
	} else if (!strcmp(what, "exec") && argc > 4) {
		size = count(argv[3]);
		grown(first);
		execv(argv[4], argv + 4);
		die("cannot execute %s: %s", argv[4], strerror(errno));
	} else {
		usage("churn|twice|unknown|grow|outgrow|shrink|climb|fork|leave|vfork|bursts|exec "
		      "NUMBER...");
	}
	done();
	return 0;
}
