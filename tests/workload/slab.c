// SPDX-License-Identifier: BSD-2-Clause
/*
 * Slab: makes FILES empty files in DIR (made if it is missing), and with them as
 * many inodes and dentries, which stay in the caches until they are shrunk: write
 * 2 to /proc/sys/vm/drop_caches (twice: the first pass may only find them recently
 * used), or make memory scarce, after "done". DIR has to be on a disk: the caches of a
 * memory file system cannot be shrunk. The files are removed in the end.
 *
 * facts: files
 */
#include "workload.h"

static int each_file(int dir, unsigned long files, bool make)
{
	char name[32];

	for (unsigned long i = 0; i < files; i++) {
		int fd;

		snprintf(name, sizeof(name), "slab-%lu", i);
		if (!make) {
			unlinkat(dir, name, 0);
			continue;
		}
		fd = openat(dir, name, O_CREAT | O_WRONLY, 0600);
		if (fd < 0)
			return -1;
		close(fd);
	}
	return 0;
}

int main(int argc, char **argv)
{
	unsigned long files;
	bool made;
	int dir;

	if (argc != 3)
		usage("DIR FILES");
	files = count(argv[2]);
	made = mkdir(argv[1], 0700) == 0;
	dir = open(argv[1], O_RDONLY | O_DIRECTORY);
	if (dir < 0)
		die("cannot open %s: %s", argv[1], strerror(errno));
	ready();
	if (each_file(dir, files, true)) {
		int error = errno;

		each_file(dir, files, false);
		die("cannot make %lu files in %s: %s", files, argv[1], strerror(error));
	}
	fact("files", "%lu", files);
	done();
	each_file(dir, files, false);
	if (made)
		rmdir(argv[1]);
	return 0;
}
