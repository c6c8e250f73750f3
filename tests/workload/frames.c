// SPDX-License-Identifier: BSD-2-Clause
/*
 * Page faults below a large frame, without frame pointers: COUNT calls of a function whose frame of
 * 600 KB takes its pages one by one (-fstack-clash-protection), and of a function that it calls and
 * that writes to PAGES pages. The pages of the frame are given back after each call.
 *
 * facts: minor (= the faults in both functions), major (= 0)
 */
#include "workload.h"

#define FRAME (600 << 10)
#define PAGES 3

static char *page;

STEP static void leaf(void)
{
	write_pages(page, PAGES, PAGE);
	page += PAGES * PAGE;
	KEEP(page);
}

STEP static void with_huge_frame(void)
{
	char memory[FRAME];

	KEEP(memory);
	leaf();
	KEEP(memory);
}

/* Gives back the pages of the stack that the next large frame will take. */
STEP static void give_back(void)
{
	char *here = __builtin_frame_address(0);
	char *end = (char *)((unsigned long)here & -PAGE) - PAGE;
	unsigned long bytes = FRAME - 4 * PAGE;

	if (madvise(end - bytes, bytes, MADV_DONTNEED))
		die("cannot give back the stack: %s", strerror(errno));
}

/* Returns the faults in so many calls. */
STEP static struct faults run(unsigned long calls)
{
	struct faults sum = {}, before, after;

	for (unsigned long i = 0; i < calls; i++) {
		give_back();
		before = faults_now();
		with_huge_frame();
		after = faults_now();
		sum.minor += after.minor - before.minor;
		sum.major += after.major - before.major;
	}
	KEEP(page);
	return sum;
}

int main(int argc, char **argv)
{
	unsigned long calls;
	struct faults faults;

	if (argc != 2)
		usage("COUNT");
	calls = count(argv[1]);
	page = map_pages((calls + 2) * PAGES);
	/* The stack grows to its full size. */
	with_huge_frame();
	run(1);
	ready();
	faults = run(calls);
	fact_faults((struct faults){}, faults);
	done();
	return 0;
}
