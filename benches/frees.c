/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * A log of what a program gives back to its allocator: a library for LD_PRELOAD, which writes the
 * address of each block that is freed, or passed to realloc(), and the process, into the file that
 * FREES names. The file begins with the number of entries, of 16 bytes each; the first one is
 * number 1.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define ENTRIES (64UL << 20)

struct entry {
	uint64_t address, pid;
};

static struct entry *entries;
static void (*next_free)(void *);
static void *(*next_realloc)(void *, size_t);

__attribute__((constructor)) static void start(void)
{
	const char *path = getenv("FREES");
	int file;

	if (next_free)
		return;
	next_realloc = dlsym(RTLD_NEXT, "realloc");
	next_free = dlsym(RTLD_NEXT, "free");
	file = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666) : -1;
	if (file < 0 || ftruncate(file, ENTRIES * sizeof(*entries)))
		abort();
	entries =
	    mmap(NULL, ENTRIES * sizeof(*entries), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	close(file);
	if (entries == MAP_FAILED)
		abort();
}

static void log_block(void *block)
{
	uint64_t number;

	if (!next_free)
		start();
	if (!block)
		return;
	number = __atomic_add_fetch(&entries->address, 1, __ATOMIC_RELAXED);
	if (number >= ENTRIES)
		abort();
	entries[number] = (struct entry){ (uint64_t)block, getpid() };
}

void free(void *block)
{
	log_block(block);
	next_free(block);
}

void *realloc(void *block, size_t bytes)
{
	log_block(block);
	return next_realloc(block, bytes);
}
