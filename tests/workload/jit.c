/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * jit COUNT SIZE: leaks COUNT blocks of SIZE bytes from code that it generates,
 * and writes the function's name into the perf map, as JIT compilers do.
 */
#include "workload.h"

/* A function that keeps a frame pointer, and calls its second argument with its first one. */
#ifdef __aarch64__
static const unsigned int code[] = {
	0xa9bf7bfd, /* stp x29, x30, [sp, #-16]! */
	0x910003fd, /* mov x29, sp */
	0xd63f0020, /* blr x1 */
	0xa8c17bfd, /* ldp x29, x30, [sp], #16 */
	0xd65f03c0, /* ret */
};
#else
/* push %rbp; mov %rsp,%rbp; call *%rsi; pop %rbp; ret */
static const unsigned char code[] = { 0x55, 0x48, 0x89, 0xe5, 0xff, 0xd6, 0x5d, 0xc3 };
#endif

int main(int argc, char **argv)
{
	void *(*compiled)(size_t size, void *(*allocate)(size_t size));
	char path[64];
	FILE *map;

	if (argc != 3)
		usage("COUNT SIZE");
	unsigned long blocks = count(argv[1]), size = count(argv[2]);
	void *at = mmap(NULL, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS,
			-1, 0);

	if (at == MAP_FAILED)
		die("cannot map memory for code: %s", strerror(errno));
	memcpy(at, code, sizeof(code));
	__builtin___clear_cache(at, (char *)at + sizeof(code));
	compiled = (void *(*)(size_t, void *(*)(size_t)))at;
	snprintf(path, sizeof(path), "/tmp/perf-%d.map", getpid());
	map = fopen(path, "w");
	if (!map)
		die("cannot write %s: %s", path, strerror(errno));
	fprintf(map, "%lx %zx compiled_by_hand\n", (unsigned long)at, sizeof(code));
	fclose(map);
	ready();
	for (unsigned long i = 0; i < blocks; i++)
		compiled(size, malloc);
	done();
	unlink(path);
	return 0;
}
