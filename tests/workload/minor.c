// SPDX-License-Identifier: BSD-2-Clause
/*
 * Minor faults: touches PAGES anonymous pages.
 *
 * write (default): one fault a page. read: one a page, too, which maps the zero
 * page. both: reads all, then writes all, two faults a page.
 *
 * facts: pages, addr, minor (= the faults above), major (= 0)
 */
#include "workload.h"

int main(int argc, char **argv)
{
	struct faults before, after;
	const char *how = argc > 2 ? argv[2] : "write";
	bool both = !strcmp(how, "both");
	bool reads = both || !strcmp(how, "read");
	bool writes = both || !strcmp(how, "write");
	unsigned long pages;
	char *at;

	if (argc < 2 || argc > 3 || !(reads || writes))
		usage("PAGES [write|read|both]");
	pages = count(argv[1]);
	settle();
	at = map_pages(pages);
	before = faults_now();
	ready();
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
