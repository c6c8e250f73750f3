// SPDX-License-Identifier: BSD-2-Clause
/*
 * Page cache that is too small: makes PATH with PAGES pages and, until it is
 * killed, reads it from its beginning to its end, over and over. If there is less
 * memory than that, each page has been dropped by the time that it is needed. The
 * file is left behind. PATH has to be on a disk.
 *
 * facts: none
 */
#include "workload.h"

STEP static void reread(int fd)
{
	static char some[64 * PAGE];
	ssize_t length;

	if (lseek(fd, 0, SEEK_SET))
		die("cannot go back: %s", strerror(errno));
	do
		length = read(fd, some, sizeof(some));
	while (length > 0);
	if (length < 0)
		die("cannot read: %s", strerror(errno));
}

int main(int argc, char **argv)
{
	int fd;

	if (argc != 3)
		usage("PATH PAGES");
	fd = open(argv[1], O_CREAT | O_RDWR | O_TRUNC, 0600);
	if (fd < 0)
		die("cannot make %s: %s", argv[1], strerror(errno));
	fill_file(fd, argv[1], count(argv[2]));
	/*
	 * A page that is not on the disk yet cannot be dropped. All pages are dropped, so that
	 * the cgroup that this process is moved into next is charged for the pages that it
	 * reads.
	 */
	if (fsync(fd) || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED))
		die("cannot write %s out: %s", argv[1], strerror(errno));
	ready();
	for (int i = 0; i < 2; i++)
		reread(fd);
	done();
	for (;;)
		reread(fd);
}
