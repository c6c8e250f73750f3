// SPDX-License-Identifier: BSD-2-Clause
/*
 * Faults on a file that is not in the page cache: makes PATH with PAGES pages,
 * drops them from the cache (before "ready"), maps the file and touches each
 * page once, in order. The file is removed in the end.
 *
 * random: MADV_RANDOM, no read-ahead: one major fault a page
 * seq:    read-ahead and fault-around as usual: few faults, in a number that varies
 * write:  as random, but writes to a shared mapping: one major fault a page, and
 *         one call of the file system's page_mkwrite a page
 *
 * PATH has to be on a disk (in a guest, below /mnt/disk): the pages of a memory
 * file system cannot be dropped.
 *
 * facts: name (the last part of PATH), pages, addr, minor, major, sum_ok
 */
#include "workload.h"

int main(int argc, char **argv)
{
	struct faults before, after;
	unsigned long pages, sum;
	bool random, write;
	char *at, *name;
	int fd;

	if (argc != 4)
		usage("PATH random|seq|write PAGES");
	write = !strcmp(argv[2], "write");
	random = write || !strcmp(argv[2], "random");
	if (!random && strcmp(argv[2], "seq"))
		usage("PATH random|seq|write PAGES");
	pages = count(argv[3]);
	name = strrchr(argv[1], '/');
	name = name ? name + 1 : argv[1];

	fd = open(argv[1], O_CREAT | O_RDWR | O_TRUNC, 0600);
	if (fd < 0)
		die("cannot make %s: %s", argv[1], strerror(errno));
	fill_file(fd, argv[1], pages);
	settle();
	at =
	    mmap(NULL, pages * PAGE, write ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
	if (at == MAP_FAILED)
		die("cannot map %s: %s", argv[1], strerror(errno));
	refuse_huge_pages(at, pages * PAGE);
	if (random && madvise(at, pages * PAGE, MADV_RANDOM))
		die("MADV_RANDOM: %s", strerror(errno));
	drop_from_cache(fd, at, pages, argv[1]);
	before = faults_now();
	ready();
	if (write) {
		write_pages(at, pages, PAGE);
		sum = sum_written(pages);
	} else {
		sum = read_pages(at, pages, PAGE);
	}
	after = faults_now();
	fact("name", "%s", name);
	fact("pages", "%lu", pages);
	fact("addr", "%p", at);
	fact_faults(before, after);
	fact("sum_ok", "%d", sum == sum_written(pages));
	done();
	unlink(argv[1]);
	return 0;
}
