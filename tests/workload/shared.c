// SPDX-License-Identifier: BSD-2-Clause
/*
 * Faults on shared memory: writes once to each of A pages of a memfd named
 * known-memfd, of B pages of a POSIX shared memory object /known-shm.PID, and of C
 * pages of an anonymous shared mapping. One fault a page.
 *
 * facts: shm (the object's name), minor, major (= A + B + C together; on 5.10 they are
 *        major)
 */
#include "workload.h"

static char *map_shared(int fd, unsigned long pages)
{
	char *at;

	if (fd >= 0 && ftruncate(fd, pages * PAGE))
		die("cannot make %lu pages of shared memory: %s", pages, strerror(errno));
	at = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE,
		  MAP_SHARED | (fd < 0 ? MAP_ANONYMOUS : 0), fd, 0);
	if (at == MAP_FAILED)
		die("cannot map %lu pages of shared memory: %s", pages, strerror(errno));
	refuse_huge_pages(at, pages * PAGE);
	return at;
}

int main(int argc, char **argv)
{
	struct faults before, after;
	unsigned long pages[3];
	char name[32], *at[3];
	int memfd, shm;

	if (argc != 4)
		usage("A B C");
	for (int i = 0; i < 3; i++)
		pages[i] = count(argv[i + 1]);
	snprintf(name, sizeof(name), "/known-shm.%d", getpid());
	memfd = syscall(SYS_memfd_create, "known-memfd", 0);
	shm = shm_open(name, O_CREAT | O_RDWR | O_EXCL, 0600);
	if (memfd < 0 || shm < 0)
		die("cannot make shared memory: %s", strerror(errno));
	shm_unlink(name);
	settle();
	at[0] = map_shared(memfd, pages[0]);
	at[1] = map_shared(shm, pages[1]);
	at[2] = map_shared(-1, pages[2]);
	before = faults_now();
	ready();
	for (int i = 0; i < 3; i++)
		write_pages(at[i], pages[i], PAGE);
	after = faults_now();
	fact("shm", "%s", name + 1);
	fact_faults(before, after);
	done();
	return 0;
}
