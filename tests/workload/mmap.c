// SPDX-License-Identifier: BSD-2-Clause
/*
 * mmap(2), munmap(2), mremap(2): COUNT calls of one KIND, each with another size.
 *
 * anon      private anonymous memory		populate   the same, brought in at once
 * shared    shared anonymous memory		exec       the same, executable, read only
 * stack     MAP_GROWSDOWN MAP_STACK		hugetlb    2 MB pages, to be reserved before
 * locked    kept in memory, below 2 GB		huge2mb    the same, asked for by their size
 * file      PATH, private, read only, from page 0, 1, 2...	sharedfile  PATH, shared
 * validate  PATH, shared, unknown flags refused
 * fixed     MAP_FIXED over what was mapped before
 * noreplace MAP_FIXED_NOREPLACE on what is mapped: each fails with EEXIST
 * fail      calls that fail, in turn: EINVAL (no length), EINVAL (offset within a
 *           page), EBADF, ENOMEM (larger than any address space), EACCES (shared
 *           and writable, but opened for reading)
 * munmap    unmaps what was mapped before "ready"
 * mremap    lets what was mapped before "ready" grow, and move
 *
 * PATH is made before and removed in the end.
 *
 * facts: kind, count (= the calls), failed, calls (see workload.h; the arguments
 *        of the system call in their order)
 */
#include "workload.h"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif
/* The lower 2 GB, where an architecture has a flag for them. */
#ifdef MAP_32BIT
#define MAP_LOW MAP_32BIT
#else
#define MAP_LOW 0
#endif
#define READ_WRITE (PROT_READ | PROT_WRITE)
#define ANONYMOUS  (MAP_PRIVATE | MAP_ANONYMOUS)

static struct calls calls;
static unsigned long failed;

/* Returns the size for the i-th call. No two sizes are equal. */
static unsigned long size_of(unsigned long i)
{
	return (i + 1) * PAGE;
}

STEP static void map(void *address, unsigned long length, int prot, int flags, int fd,
		     unsigned long offset)
{
	long result = (long)mmap(address, length, prot, flags, fd, offset);

	calls_add(&calls, result, 6, address, length, (unsigned long)prot, (unsigned long)flags,
		  (unsigned long)(unsigned int)fd, offset);
	failed += result == -1;
}

STEP static void unmap(char *address, unsigned long length)
{
	long result = munmap(address, length);

	calls_add(&calls, result, 2, address, length);
	failed += result == -1;
}

STEP static void remap(char *address, unsigned long old, unsigned long new)
{
	long result = (long)mremap(address, old, new, MREMAP_MAYMOVE);

	calls_add(&calls, result, 4, address, old, new, (unsigned long)MREMAP_MAYMOVE);
	failed += result == -1;
}

/* Makes one of the calls that fail. fd is open for reading only. */
static void map_wrong(unsigned long i, int fd)
{
	switch (i % 5) {
	case 0:
		map(NULL, 0, READ_WRITE, ANONYMOUS, -1, 0);
		break;
	case 1:
		/* libc refuses such an offset itself, so the call must reach the kernel. */
		calls_add(&calls, syscall(SYS_mmap, NULL, PAGE, PROT_READ, MAP_PRIVATE, fd, 1UL), 6,
			  NULL, PAGE, (unsigned long)PROT_READ, (unsigned long)MAP_PRIVATE,
			  (unsigned long)fd, 1UL);
		failed += calls.call[calls.made - 1].result == -1;
		break;
	case 2:
		map(NULL, PAGE, PROT_READ, MAP_PRIVATE, 9999, 0);
		break;
	case 3:
		map(NULL, 1UL << 60, READ_WRITE, ANONYMOUS, -1, 0);
		break;
	case 4:
		map(NULL, PAGE, READ_WRITE, MAP_SHARED, fd, 0);
		break;
	}
}

static void one_call(const char *kind, unsigned long i, char *before, int fd)
{
	if (!strcmp(kind, "anon"))
		map(NULL, size_of(i), READ_WRITE, ANONYMOUS, -1, 0);
	else if (!strcmp(kind, "shared"))
		map(NULL, size_of(i), READ_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	else if (!strcmp(kind, "populate"))
		map(NULL, size_of(i), READ_WRITE, ANONYMOUS | MAP_POPULATE, -1, 0);
	else if (!strcmp(kind, "exec"))
		map(NULL, size_of(i), PROT_READ | PROT_EXEC, ANONYMOUS, -1, 0);
	else if (!strcmp(kind, "stack"))
		map(NULL, size_of(i), READ_WRITE,
		    ANONYMOUS | MAP_GROWSDOWN | MAP_STACK | MAP_NORESERVE, -1, 0);
	else if (!strcmp(kind, "hugetlb"))
		map(NULL, HUGE_PAGE, READ_WRITE, ANONYMOUS | MAP_HUGETLB, -1, 0);
	else if (!strcmp(kind, "huge2mb"))
		map(NULL, HUGE_PAGE, READ_WRITE, ANONYMOUS | MAP_HUGETLB | 21 << MAP_HUGE_SHIFT, -1,
		    0);
	else if (!strcmp(kind, "locked"))
		map(NULL, size_of(i), READ_WRITE, ANONYMOUS | MAP_LOCKED | MAP_LOW, -1, 0);
	else if (!strcmp(kind, "validate"))
		map(NULL, size_of(i), PROT_READ, MAP_SHARED_VALIDATE, fd, i * PAGE);
	else if (!strcmp(kind, "file"))
		map(NULL, size_of(i), PROT_READ, MAP_PRIVATE, fd, i * PAGE);
	else if (!strcmp(kind, "sharedfile"))
		map(NULL, size_of(i), READ_WRITE, MAP_SHARED, fd, i * PAGE);
	else if (!strcmp(kind, "fixed"))
		map(before, size_of(i), READ_WRITE, ANONYMOUS | MAP_FIXED, -1, 0);
	else if (!strcmp(kind, "noreplace"))
		map(before, size_of(i), READ_WRITE, ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	else if (!strcmp(kind, "fail"))
		map_wrong(i, fd);
	else if (!strcmp(kind, "munmap"))
		unmap(before, size_of(i));
	else if (!strcmp(kind, "mremap"))
		remap(before, size_of(i), size_of(i) + 64 * PAGE);
	else
		die("no kind '%s'; see the head of mmap.c", kind);
}

/* Returns memory for the i-th call, a page apart from the other memory, so that no mappings are
 * merged. */
static char *place(char *all, unsigned long i)
{
	return all + i * (i + 1) / 2 * PAGE + i * PAGE;
}

int main(int argc, char **argv)
{
	bool with_file, writes;
	const char *kind;
	unsigned long n;
	int fd = -1;
	char *all;

	if (argc < 3 || argc > 4)
		usage("KIND COUNT [PATH]");
	kind = argv[1];
	n = count(argv[2]);
	if (n > 2000)
		die("at most 2000 calls, or their memory gets too large");
	writes = !strcmp(kind, "sharedfile");
	with_file =
	    writes || !strcmp(kind, "file") || !strcmp(kind, "fail") || !strcmp(kind, "validate");
	if (with_file != (argc == 4))
		die(with_file ? "the kind '%s' wants a PATH" : "the kind '%s' takes no PATH", kind);
	if (with_file) {
		fd = open(argv[3], O_CREAT | O_RDWR | O_TRUNC, 0600);
		if (fd < 0 || ftruncate(fd, (2 * n + 1) * PAGE))
			die("cannot make %s: %s", argv[3], strerror(errno));
		close(fd);
		fd = open(argv[3], (writes ? O_RDWR : O_RDONLY) | O_CLOEXEC);
	}
	all = map_pages(n * (n + 1) / 2 + n + 1);
	for (unsigned long i = 0; i < n; i++)
		munmap(place(all, i) + size_of(i), PAGE);
	ready();
	for (unsigned long i = 0; i < n; i++)
		one_call(kind, i, place(all, i), fd);
	fact("kind", "%s", kind);
	fact("count", "%lu", calls.made);
	fact("failed", "%lu", failed);
	fact_calls("calls", &calls);
	done();
	if (with_file)
		unlink(argv[3]);
	return 0;
}
