/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * loaded COUNT SIZE: an allocator that is loaded while the program runs.
 *
 * The program loads libloaded.so, which is beside it, and says "done" once. When it
 * may go on, it leaks COUNT blocks of SIZE bytes of that library's je_malloc, frees as
 * many, and says "done" once more. Built with -DLIBRARY this is the library.
 */
#include "workload.h"

#ifdef LIBRARY

static char room[16 << 20];
static unsigned long used;

void *je_malloc(unsigned long bytes);
void je_free(void *block);

STEP void *je_malloc(unsigned long bytes)
{
	void *block = room + used;

	used += (bytes + 15) & ~15UL;
	return used <= sizeof(room) ? block : NULL;
}

STEP void je_free(void *block)
{
	__asm__ volatile("" : : "r"(block) : "memory");
}

#else

#include <dlfcn.h>

static void *volatile kept;

STEP static void leak_loaded(void *library, unsigned long blocks, unsigned long size)
{
	void *(*take)(unsigned long) = dlsym(library, "je_malloc");
	void (*give)(void *) = dlsym(library, "je_free");

	for (unsigned long i = 0; i < blocks; i++) {
		kept = take(size);
		give(take(size));
	}
}

int main(int argc, char **argv)
{
	char path[4096];
	void *library;

	if (argc != 3)
		usage("COUNT SIZE");
	snprintf(path, sizeof(path), "%s", argv[0]);
	*strrchr(path, '/') = 0;
	strcat(path, "/libloaded.so");
	ready();
	library = dlopen(path, RTLD_NOW);
	if (!library)
		die("%s", dlerror());
	say("done\n", 5);
	wait_for_line();
	leak_loaded(library, count(argv[1]), count(argv[2]));
	done();
	return 0;
}

#endif
