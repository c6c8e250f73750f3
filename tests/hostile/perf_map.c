// SPDX-License-Identifier: BSD-2-Clause
/*
 * perf_map WHAT CALLS: as an unprivileged user, makes CALLS calls of brk(2) from
 * code that it generates, with WHAT as its perf map:
 *
 *	fifo		a FIFO
 *	link=T		a symbolic link to T
 *	hole=GIB	a hole of so many GiB
 *	name=T		a line that names the code T
 *
 * facts: brk (calls)
 */
#include "hostile.h"

/* A function that keeps a frame pointer, and calls brk(0). */
#ifdef __aarch64__
static const unsigned int code[] = {
	0xa9bf7bfd, /* stp x29, x30, [sp, #-16]! */
	0x910003fd, /* mov x29, sp */
	0xd2801ac8, /* mov x8, #214 */
	0xd2800000, /* mov x0, #0 */
	0xd4000001, /* svc #0 */
	0xa8c17bfd, /* ldp x29, x30, [sp], #16 */
	0xd65f03c0, /* ret */
};
#else
/* push %rbp; mov %rsp,%rbp; mov $12,%eax; xor %edi,%edi; syscall; pop %rbp; ret */
static const unsigned char code[] = { 0x55, 0x48, 0x89, 0xe5, 0xb8, 12,	  0,   0,
				      0,    0x31, 0xff, 0x0f, 0x05, 0x5d, 0xc3 };
#endif

static char path[64];

static void make(const char *what, unsigned long at)
{
	const char *value = strchr(what, '=') ? strchr(what, '=') + 1 : "";
	int fd;

	if (!strcmp(what, "fifo")) {
		if (mkfifo(path, 0644))
			die("cannot make a FIFO: %s", strerror(errno));
		return;
	}
	if (!strncmp(what, "link=", 5)) {
		if (symlink(value, path))
			die("cannot make a link: %s", strerror(errno));
		return;
	}
	fd = open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0644);
	if (fd < 0)
		die("cannot make %s: %s", path, strerror(errno));
	if (!strncmp(what, "hole=", 5)) {
		if (ftruncate(fd, count(value) << 30))
			die("cannot make a hole: %s", strerror(errno));
	} else if (!strncmp(what, "name=", 5)) {
		dprintf(fd, "%lx 1000 %s\n", at, value);
	} else {
		die("'%s' is no perf map", what);
	}
	close(fd);
}

int main(int argc, char **argv)
{
	if (argc != 3)
		usage("WHAT CALLS");
	unsigned long calls = count(argv[2]);

	snprintf(path, sizeof(path), "/tmp/perf-%d.map", getpid());
	/* A process that had the same PID may have left its map. */
	unlink(path);
	drop_root();
	void *at = mmap(NULL, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS,
			-1, 0);

	if (at == MAP_FAILED)
		die("cannot map memory for code: %s", strerror(errno));
	memcpy(at, code, sizeof(code));
	__builtin___clear_cache(at, (char *)at + sizeof(code));
	make(argv[1], (unsigned long)at);
	ready();
	for (unsigned long i = 0; i < calls; i++)
		((void (*)(void))at)();
	fact("brk", "%lu", calls);
	done();
	unlink(path);
	return 0;
}
