// SPDX-License-Identifier: BSD-2-Clause
/*
 * Faults on the huge pages of a file: makes PATH on a hugetlbfs (in a guest,
 * /dev/hugepages) and writes to its PAGES pages of 2 MB, one fault each. The file
 * is removed in the end.
 *
 * facts: pages, addr, minor (= pages), major (= 0)
 */
#include "workload.h"

int main(int argc, char **argv)
{
	struct faults before, after;
	unsigned long pages;
	char *at;
	int fd;

	if (argc != 3)
		usage("PAGES PATH");
	pages = count(argv[1]);
	fd = open(argv[2], O_CREAT | O_RDWR | O_TRUNC, 0600);
	if (fd < 0)
		die("cannot make %s: %s", argv[2], strerror(errno));
	settle();
	if (ftruncate(fd, pages * HUGE_PAGE))
		die("cannot make %s %lu huge pages long: %s; is it on a hugetlbfs?", argv[2], pages,
		    strerror(errno));
	at = mmap(NULL, pages * HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (at == MAP_FAILED) {
		int error = errno;

		unlink(argv[2]);
		die("cannot map %lu huge pages: %s; echo %lu >/proc/sys/vm/nr_hugepages", pages,
		    strerror(error), pages);
	}
	before = faults_now();
	ready();
	write_pages(at, pages, HUGE_PAGE);
	after = faults_now();
	fact("pages", "%lu", pages);
	fact("addr", "%p", at);
	fact_faults(before, after);
	done();
	unlink(argv[2]);
	return 0;
}
