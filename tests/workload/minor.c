// SPDX-License-Identifier: BSD-2-Clause
/*
 * Minor faults: touches PAGES anonymous pages.
 *
 * write (default): one fault a page. read: one a page, too, which maps the zero
 * page. both: reads all pages, then writes all, two faults a page. lock: makes the
 * kernel bring in all pages by mlock(2), which is no fault. stacks ROUNDS: in each
 * round writes to PAGES further pages, each from a stack of its own, and is ready again.
 *
 * facts: pages, addr, minor (= the faults above), major (= 0)
 */
#include "workload.h"

/* The bits of `path` choose the functions on the way down. */
STEP static void left(char *page, unsigned long path, int bits);
STEP static void right(char *page, unsigned long path, int bits);

static void down(char *page, unsigned long path, int bits)
{
	if (!bits)
		*(volatile char *)page = 1;
	else if (path & 1)
		left(page, path >> 1, bits - 1);
	else
		right(page, path >> 1, bits - 1);
}

STEP static void left(char *page, unsigned long path, int bits)
{
	down(page, path, bits);
	__asm__ volatile("");
}

STEP static void right(char *page, unsigned long path, int bits)
{
	down(page, path, bits);
	__asm__ volatile("");
}

static void from_stacks(unsigned long pages, unsigned long rounds)
{
	char *at;

	settle();
	at = map_pages(pages * rounds);
	for (unsigned long i = 0; i < pages * rounds; i++) {
		if (i % pages == 0)
			ready();
		down(at + i * PAGE, i, 20);
	}
	done();
}

int main(int argc, char **argv)
{
	struct faults before, after;
	const char *how = argc > 2 ? argv[2] : "write";
	bool both = !strcmp(how, "both");
	bool locks = !strcmp(how, "lock");
	bool reads = both || !strcmp(how, "read");
	bool writes = both || !strcmp(how, "write");
	unsigned long pages;
	char *at;

	if (argc == 4 && !strcmp(how, "stacks")) {
		from_stacks(count(argv[1]), count(argv[3]));
		return 0;
	}
	if (argc < 2 || argc > 3 || !(reads || writes || locks))
		usage("PAGES [write|read|both|lock|stacks ROUNDS]");
	pages = count(argv[1]);
	settle();
	at = map_pages(pages);
	before = faults_now();
	ready();
	if (locks && mlock(at, pages * PAGE))
		die("cannot lock: %s", strerror(errno));
	if (reads)
		read_pages(at, pages, PAGE);
	if (writes)
		write_pages(at, pages, PAGE);
	after = faults_now();
	fact("pages", "%lu", pages);
	fact("addr", "%p", at);
	fact_faults(before, after);
	done();
	return 0;
}
