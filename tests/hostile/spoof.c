// SPDX-License-Identifier: BSD-2-Clause
/*
 * spoof LIBRARY FAKE FOLDER: as an unprivileged user, makes a tool that looks for
 * LIBRARY in this process find FAKE. In a mount namespace of the process's own, FAKE is
 * mounted over the path of LIBRARY, with the same inode number on another device. The
 * real LIBRARY is mapped again and again, each time elsewhere, so that this process is
 * the last that a tool sees map it, and the mapping no longer exists when the tool looks there.
 * FOLDER is where a file system for FAKE can be mounted.
 *
 * facts: none
 */
#include "hostile.h"
#include <pthread.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>

/* Addresses where nothing else is mapped. */
#define PLACE  0x100000000UL
#define PLACES (1 << 20)

static void write_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);

	if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text))
		die("cannot write %s: %s", path, strerror(errno));
	close(fd);
}

/* Makes the process root of a user namespace, which may mount. */
static void become_root_of_namespaces(void)
{
	unsigned int uid = getuid(), gid = getgid();
	char map[32];

	if (prctl(PR_SET_DUMPABLE, 1) || unshare(CLONE_NEWUSER | CLONE_NEWNS))
		die("no namespaces: %s", strerror(errno));
	write_file("/proc/self/setgroups", "deny");
	snprintf(map, sizeof(map), "0 %u 1", uid);
	write_file("/proc/self/uid_map", map);
	snprintf(map, sizeof(map), "0 %u 1", gid);
	write_file("/proc/self/gid_map", map);
}

/* Makes a copy with the wanted inode number. A tmpfs numbers its inodes in ascending order, so
 * files are made until one has that number. */
static void copy_as_inode(int from, const char *path, ino_t wanted)
{
	char buffer[PAGE];
	struct stat made;
	ssize_t bytes;
	int fd;

	for (;;) {
		fd = open(path, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0755);
		if (fd < 0 || fstat(fd, &made) || made.st_ino > wanted)
			die("cannot make inode %lu: %s", (unsigned long)wanted, strerror(errno));
		if (made.st_ino == wanted)
			break;
		close(fd);
		unlink(path);
	}
	while ((bytes = read(from, buffer, sizeof(buffer))) > 0)
		if (write(fd, buffer, bytes) != bytes)
			die("cannot copy: %s", strerror(errno));
	close(fd);
}

static void *map_elsewhere(void *library)
{
	for (unsigned long i = 0;; i = (i + 1) % PLACES) {
		void *code = mmap((void *)(PLACE + i * PAGE), PAGE, PROT_READ | PROT_EXEC,
				  MAP_PRIVATE | MAP_FIXED, *(int *)library, 0);

		if (code == MAP_FAILED)
			die("cannot map it: %s", strerror(errno));
		/* Often enough to be the last, and not too often for a tool on a busy machine. */
		usleep(1000);
		munmap(code, PAGE);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	static int library;
	char path[4096];
	struct stat real;
	pthread_t thread;
	int fake;

	if (argc != 4)
		usage("LIBRARY FAKE FOLDER");
	drop_root();
	library = open(argv[1], O_RDONLY | O_CLOEXEC);
	fake = open(argv[2], O_RDONLY | O_CLOEXEC);
	if (library < 0 || fake < 0 || fstat(library, &real))
		die("cannot open %s or %s: %s", argv[1], argv[2], strerror(errno));
	become_root_of_namespaces();
	if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
	    mount("none", argv[3], "tmpfs", 0, NULL))
		die("cannot mount: %s", strerror(errno));
	snprintf(path, sizeof(path), "%s/fake", argv[3]);
	copy_as_inode(fake, path, real.st_ino);
	if (mount(path, argv[1], NULL, MS_BIND, NULL))
		die("cannot mount over %s: %s", argv[1], strerror(errno));
	if (pthread_create(&thread, NULL, map_elsewhere, &library))
		die("no thread");
	ready();
	done();
	return 0;
}
