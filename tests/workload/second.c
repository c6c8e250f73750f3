/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Two allocators in one program: glibc's malloc, and that of a library, which only some blocks are
 * allocated by.
 *
 *	second LIBRARY FUNCTION
 *	second-je
 *
 * FUNCTION of LIBRARY allocates as malloc does; with second-je, je_malloc does, which is linked
 * statically. A variable holds a list of 1009 blocks of that allocator, each of which is the only
 * holder of a block of glibc's. Nothing holds 101 blocks of glibc's, nor 103 blocks of that
 * allocator, each of which is the only holder of a block of glibc's.
 */
#include "workload.h"
#include "wipe.h"

#include <dlfcn.h>

#define HELD	1009
#define LOST	101
#define BESIDES 103
/* Sizes that no other block of the program has. */
#define OURS   1777
#define THEIRS 2999

struct node {
	struct node *next;
	void *block;
};

#ifdef JEMALLOC
void *je_malloc(size_t size);
#endif

static struct node *volatile list;

static struct node *take(void *(*other)(size_t), struct node *next)
{
	struct node *node = other(THEIRS);

	if (!node)
		die("the library has no memory");
	memset(node, 0, THEIRS);
	node->next = next;
	node->block = malloc(OURS);
	memset(node->block, 0x5a, OURS);
	return node;
}

STEP static void allocate(void *(*other)(size_t))
{
	for (int i = 0; i < HELD; i++)
		list = take(other, list);
	for (int i = 0; i < LOST; i++)
		memset(malloc(OURS), 0x5a, OURS);
	for (int i = 0; i < BESIDES; i++)
		take(other, NULL);
	/* The last blocks are still in use: in registers, and in the allocators' own state. */
	list = take(other, list);
}

int main(int argc, char **argv)
{
#ifdef JEMALLOC
	(void)argv;
	if (argc != 1)
		usage("");
	allocate(je_malloc);
#else
	void *library, *function;

	if (argc != 3)
		usage("LIBRARY FUNCTION");
	library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
	if (!library)
		die("%s", dlerror());
	function = dlsym(library, argv[2]);
	if (!function)
		die("%s", dlerror());
	allocate((void *(*)(size_t))function);
#endif
	wipe();
	ready();
	done();
	return 0;
}
