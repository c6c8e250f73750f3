/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * odd KIND FILE COUNT SIZE: leaks COUNT blocks of SIZE bytes while something is
 * mapped executable that is no ELF file, as compilers at run time and emulators do:
 *
 *	memfd	a memory file, mapped twice
 *	sysv	shared memory that is already deleted
 *	file	FILE, whatever it contains
 *	deleted	FILE, which is then deleted
 *	zero	/dev/zero
 */
#include "workload.h"

#include <sys/shm.h>

static void *volatile kept;

STEP static void leak_odd(unsigned long blocks, unsigned long size)
{
	for (unsigned long i = 0; i < blocks; i++)
		kept = malloc(size);
}

static void *map(int fd, int flags)
{
	return mmap(NULL, PAGE, PROT_READ | PROT_EXEC, flags, fd, 0);
}

int main(int argc, char **argv)
{
	void *at = MAP_FAILED;
	const char *kind;

	if (argc != 5)
		usage("KIND FILE COUNT SIZE");
	kind = argv[1];
	if (!strcmp(kind, "memfd")) {
		int fd = memfd_create("doublemapper", MFD_CLOEXEC);

		if (ftruncate(fd, PAGE) || map(fd, MAP_PRIVATE) == MAP_FAILED)
			die("cannot make a memfd: %s", strerror(errno));
		at = map(fd, MAP_SHARED);
	} else if (!strcmp(kind, "sysv")) {
		int id = shmget(IPC_PRIVATE, PAGE, IPC_CREAT | 0700);

		at = shmat(id, NULL, SHM_EXEC);
		shmctl(id, IPC_RMID, NULL);
	} else if (!strcmp(kind, "zero")) {
		at = map(open("/dev/zero", O_RDWR), MAP_PRIVATE);
	} else {
		at = map(open(argv[2], O_RDONLY), MAP_PRIVATE);
		if (!strcmp(kind, "deleted") && unlink(argv[2]))
			die("cannot delete %s: %s", argv[2], strerror(errno));
	}
	if (at == MAP_FAILED)
		die("cannot map %s: %s", kind, strerror(errno));
	ready();
	leak_odd(count(argv[3]), count(argv[4]));
	done();
	return 0;
}
