/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * The truth about a heap: a library that intercepts malloc (LD_PRELOAD), and
 * writes every allocation and every free into the file that RECORD names, 16 bytes
 * each: an address, and the size that was requested, or all ones for a free. The
 * file begins with the number of entries, in 16 bytes.
 *
 * A free is written before the allocator learns of it, an allocation after, so
 * that the live blocks of a stopped process are known.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define RECORDS (8UL << 20)
#define FREED	UINT64_MAX

struct record {
	uint64_t address;
	uint64_t size;
};

static struct record *records;
static char first_bytes[64 << 10] __attribute__((aligned(16)));
static size_t first_used;
static int starting;

static void *(*next_malloc)(size_t);
static void (*next_free)(void *);
static void *(*next_calloc)(size_t, size_t);
static void *(*next_realloc)(void *, size_t);
static int (*next_posix_memalign)(void **, size_t, size_t);

static void start(void)
{
	const char *path = getenv("RECORD");
	int fd;

	if (starting)
		return;
	starting = 1;
	next_malloc = dlsym(RTLD_NEXT, "malloc");
	next_calloc = dlsym(RTLD_NEXT, "calloc");
	next_realloc = dlsym(RTLD_NEXT, "realloc");
	next_posix_memalign = dlsym(RTLD_NEXT, "posix_memalign");
	fd = path ? open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600) : -1;
	if (fd >= 0 && !ftruncate(fd, (RECORDS + 1) * sizeof(*records))) {
		records = mmap(NULL, (RECORDS + 1) * sizeof(*records), PROT_READ | PROT_WRITE,
			       MAP_SHARED, fd, 0);
		if (records == MAP_FAILED)
			records = NULL;
	}
	if (fd >= 0)
		close(fd);
	next_free = dlsym(RTLD_NEXT, "free");
	starting = 0;
}

static int ready(void)
{
	if (!next_free)
		start();
	return next_free != NULL;
}

/* Allocates for dlsym() itself. */
static void *first(size_t size)
{
	void *block = first_bytes + first_used;

	first_used += (size + 15) & ~15UL;
	if (first_used > sizeof(first_bytes))
		abort();
	return block;
}

static int is_first(const void *block)
{
	return (const char *)block >= first_bytes &&
	       (const char *)block < first_bytes + sizeof(first_bytes);
}

static void *record(void *block, uint64_t size)
{
	uint64_t at;

	if (!records || !block)
		return block;
	at = __atomic_add_fetch(&records[0].address, 1, __ATOMIC_SEQ_CST);
	if (at > RECORDS)
		abort();
	records[at].size = size;
	__atomic_store_n(&records[at].address, (uint64_t)block, __ATOMIC_RELEASE);
	return block;
}

void *malloc(size_t size)
{
	return ready() ? record(next_malloc(size), size) : first(size);
}

void *calloc(size_t count, size_t size)
{
	return ready() ? record(next_calloc(count, size), count * size) : first(count * size);
}

void free(void *block)
{
	int error = errno;

	if (!block || is_first(block) || !ready())
		return;
	record(block, FREED);
	next_free(block);
	errno = error;
}

void *realloc(void *old, size_t size)
{
	void *block;

	if (!old || is_first(old)) {
		block = malloc(size);
		if (old && block)
			memcpy(block, old, size);
		return block;
	}
	record(old, FREED);
	return record(next_realloc(old, size), size);
}

int posix_memalign(void **block, size_t alignment, size_t size)
{
	int error = ready() ? next_posix_memalign(block, alignment, size) : ENOMEM;

	if (!error)
		record(*block, size);
	return error;
}
