// SPDX-License-Identifier: BSD-2-Clause
/*
 * COUNT calls of malloc(SIZE) or sbrk(SIZE), by calls that are inlined into one
 * another, in files and lines that tests know.
 *
 * facts: count
 */
#include "workload.h"

#define INLINED static inline __attribute__((always_inline))

static void *volatile blocks[65536];

#line 1007 "/usr/src/lines/inner.h"
INLINED void *inner(bool by_malloc, unsigned long size)
{
	return by_malloc ? malloc(size) : sbrk(size); /* 1009 */
}
#line 2001 "/usr/src/lines/outer.h"
INLINED void *outer(bool by_malloc, unsigned long size)
{
	return inner(by_malloc, size); /* 2003 */
}
#line 3001 "/usr/src/lines/lines.c"
STEP void allocate(bool by_malloc, unsigned long count, unsigned long size)
{
	unsigned long i;

	for (i = 0; i < count; i++)
		blocks[i] = outer(by_malloc, size); /* 3006 */
}
#line 4001 "/usr/src/lines/lines.c"
int main(int argc, char **argv)
{
	unsigned long number;

	if (argc != 4)
		usage("malloc|sbrk COUNT SIZE");
	number = count(argv[2]);
	if (number > sizeof(blocks) / sizeof(*blocks))
		die("COUNT is too large");
	ready();
	allocate(!strcmp(argv[1], "malloc"), number, count(argv[3])); /* 4011 */
	fact("count", "%lu", number);
	done();
	return 0;
}
