// SPDX-License-Identifier: BSD-2-Clause
/*
 * Faults on a file that is not in the page cache: makes PATH with PAGES pages,
 * drops them from the cache (before "ready"), maps the file and touches each
 * page once, in order. The file is removed in the end.
 *
 * random: MADV_RANDOM, no read-ahead: one major fault a page
 * seq:    read-ahead and fault-around as usual: few faults, how many depends
 * write:  as random, but writes to a shared mapping: one major fault a page, and
 *         the file system's page_mkwrite once a page
 *
 * PATH has to be on a disk (in a guest, below /mnt/disk): the pages of a memory
 * file system cannot be dropped.
 *
 * facts: name (the last part of PATH), pages, addr, minor, major, sum_ok
 */
#include "workload.h"

static void fill(int fd, const char *path, unsigned long pages)
{
	static unsigned long page[PAGE / sizeof(long)];

	for (unsigned long i = 0; i < pages; i++) {
		page[0] = i + 1;
		if (write(fd, page, PAGE) != (ssize_t)PAGE) {
			int error = errno;

			unlink(path);
			die("cannot write to %s: %s", path, strerror(error));
		}
	}
}

/* Page cache pages behind the mapping. */
static unsigned long cached(char *at, unsigned long pages)
{
	unsigned long found = 0;
	unsigned char in[512];

	for (unsigned long i = 0; i < pages; i += sizeof(in)) {
		unsigned long n = pages - i < sizeof(in) ? pages - i : sizeof(in);

		if (mincore(at + i * PAGE, n * PAGE, in))
			die("mincore: %s", strerror(errno));
		for (unsigned long j = 0; j < n; j++)
			found += in[j] & 1;
	}
	return found;
}

int main(int argc, char **argv)
{
	struct faults before, after;
	unsigned long pages, left = 1, sum;
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
	fill(fd, argv[1], pages);
	settle();
	at =
	    mmap(NULL, pages * PAGE, write ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
	if (at == MAP_FAILED)
		die("cannot map %s: %s", argv[1], strerror(errno));
	refuse_huge_pages(at, pages * PAGE);
	if (random && madvise(at, pages * PAGE, MADV_RANDOM))
		die("MADV_RANDOM: %s", strerror(errno));
	/* A page that the kernel is still busy with stays: ask again. */
	for (int tries = 0; left && tries < 50; tries++) {
		if (fsync(fd) || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED))
			die("cannot drop %s from the cache: %s", argv[1], strerror(errno));
		left = cached(at, pages);
		if (left)
			usleep(20000);
	}
	if (left) {
		unlink(argv[1]);
		die("%lu pages of %s stay in the cache; name a file on a disk", left, argv[1]);
	}
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
