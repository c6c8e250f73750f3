/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * jit COUNT SIZE: leaks COUNT blocks of SIZE bytes from code that it generates,
 * and writes the function's name into the perf map, as JIT compilers do.
 */
#include "workload.h"

/* push %rbp; mov %rsp,%rbp; call *%rsi; pop %rbp; ret */
static const unsigned char code[] = { 0x55, 0x48, 0x89, 0xe5, 0xff, 0xd6, 0x5d, 0xc3 };

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
