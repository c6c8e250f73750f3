// SPDX-License-Identifier: BSD-2-Clause
/*
 * Swap-in: PAGES anonymous pages are sent to swap by MADV_PAGEOUT (before
 * "ready"), and then read back one after the other. Needs swap, with
 * vm.page-cluster=0, or one read brings in its neighbours as well. With "shared", the
 * pages are those of a memfd, mapped shared.
 *
 * facts: pages, addr, swapped (= pages; by pagemap, just before the reading),
 *        major (= pages), minor (= 0), sum_ok
 */
#include "workload.h"

static bool shared;

/*
 * Returns how many of the pages are in swap: bit 62 of their entries in pagemap. Shared
 * pages have no such entries; those that are not in memory are counted.
 */
static unsigned long in_swap(char *at, unsigned long pages)
{
	unsigned long swapped = 0, entry[512];
	int fd;

	if (shared)
		return pages - cached(at, pages);
	fd = open("/proc/self/pagemap", O_RDONLY);
	if (fd < 0)
		die("cannot open /proc/self/pagemap: %s", strerror(errno));
	for (unsigned long i = 0; i < pages; i += 512) {
		unsigned long n = pages - i < 512 ? pages - i : 512;

		if (pread(fd, entry, n * 8, ((unsigned long)at / PAGE + i) * 8) != (ssize_t)n * 8)
			die("cannot read /proc/self/pagemap: %s", strerror(errno));
		for (unsigned long j = 0; j < n; j++)
			swapped += entry[j] >> 62 & 1;
	}
	close(fd);
	return swapped;
}

static char *map_memfd(unsigned long pages)
{
	int fd = memfd_create("pageout", 0);
	char *at = MAP_FAILED;

	if (fd >= 0 && !ftruncate(fd, pages * PAGE))
		at = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (at == MAP_FAILED)
		die("cannot map %lu shared pages: %s", pages, strerror(errno));
	close(fd);
	refuse_huge_pages(at, pages * PAGE);
	return at;
}

int main(int argc, char **argv)
{
	struct faults before, after;
	unsigned long pages, swapped = 0, sum;
	char *at;

	if (argc < 2 || argc > 3 || (argc == 3 && strcmp(argv[2], "shared")))
		usage("PAGES [shared]");
	pages = count(argv[1]);
	shared = argc == 3;
	settle();
	at = shared ? map_memfd(pages) : map_pages(pages);
	write_pages(at, pages, PAGE);
	/* A page that other code holds a reference to for a moment stays in memory, so the call
	 * is repeated. */
	for (int tries = 0; swapped < pages && tries < 50; tries++) {
		if (madvise(at, pages * PAGE, MADV_PAGEOUT))
			die("MADV_PAGEOUT: %s; it needs Linux 5.4", strerror(errno));
		swapped = in_swap(at, pages);
		if (swapped < pages)
			usleep(20000);
	}
	if (swapped < pages)
		die("only %lu of %lu pages went to swap; turn on enough of it", swapped, pages);
	before = faults_now();
	ready();
	/* Counts again, because something else may have read pages in during the wait. */
	swapped = in_swap(at, pages);
	sum = read_pages(at, pages, PAGE);
	after = faults_now();
	fact("pages", "%lu", pages);
	fact("addr", "%p", at);
	fact("swapped", "%lu", swapped);
	fact_faults(before, after);
	fact("sum_ok", "%d", sum == sum_written(pages));
	done();
	return 0;
}
