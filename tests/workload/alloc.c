/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Allocations whose outcome is known.
 *
 *   alloc leak COUNT SIZE      each function of the allocator leaks COUNT blocks of SIZE bytes,
 *                              from a function of its own: leak_malloc, leak_calloc, ...
 *   alloc one KIND COUNT SIZE  only leak_KIND
 *   alloc balanced COUNT SIZE  as leak, and everything is freed again
 *   alloc mixed COUNT SIZE     both leak and balanced
 *   alloc realloc COUNT        the corner cases of realloc; comments at realloc_* say what is left
 *   alloc failing COUNT        calls that fail, and leave nothing
 *   alloc big COUNT SIZE       blocks that malloc takes from mmap, COUNT kept and COUNT freed
 *   alloc hole COUNT           mappings of 1 MiB, from below where malloc has just returned; the
 *                              return address of malloc is still on the stack
 *   alloc munmap PAGES         parts of mappings unmapped, moved and replaced
 *   alloc threads THREADS COUNT KEEP SIZE
 *                              each thread allocates COUNT blocks and frees all but KEEP of its
 *                              neighbour's, while the others do the same
 *   alloc pool COUNT SIZE      blocks of a pool of the program's own: pool_take, pool_store
 *                              (COUNT blocks of two SIZEs each), pool_resize, and pool_give
 *   alloc deep DEPTH SIZE      one block from DEPTH calls down
 *   alloc stacks COUNT         one block from each of COUNT different stacks
 *   alloc churn ROUNDS COUNT   in each of ROUNDS one block from each of COUNT other stacks,
 *                              freed at once but for the round's first; asks between rounds
 *   alloc renamed COUNT SIZE   a second thread gets the name "renamed", asks, and leaks COUNT
 *                              blocks by leak_malloc
 *   alloc hold                 nothing
 */
#include "workload.h"

#include <alloca.h>
#include <malloc.h>
#include <pthread.h>
#include <sys/prctl.h>

/* jemalloc has no pvalloc: glibc's would be called, and jemalloc's free would crash on its
 * blocks. */
#if defined(__GLIBC__) && !defined(JEMALLOC)
#define PVALLOC
#endif

/* With a prefix, reallocarray would still be glibc's. */
#ifndef PREFIXED
#define REALLOCARRAY
#endif

#ifdef GO
/* Section by which programs of the Go toolchain are told from others. */
__attribute__((section(".go.buildinfo"), used)) static const char go[] = "\xff Go buildinf:";
#endif

/* Leaked blocks stay reachable, so that no optimiser drops them. */
static void *volatile kept;

static unsigned long blocks, size;

#define LEAK(name, expression)                                                                     \
	STEP static void leak_##name(void)                                                         \
	{                                                                                          \
		for (unsigned long i = 0; i < blocks; i++) {                                       \
			void *block = expression;                                                  \
                                                                                                   \
			if (!block || block == MAP_FAILED)                                         \
				die(#name " failed: %s", strerror(errno));                         \
			kept = block;                                                              \
		}                                                                                  \
	}

static void *aligned(void)
{
	void *block = NULL;

	return posix_memalign(&block, 64, size) ? NULL : block;
}

static void *moved_mapping(void)
{
	void *old = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	return old == MAP_FAILED ? old : mremap(old, size, 3 * size, MREMAP_MAYMOVE);
}

LEAK(malloc, malloc(size))
LEAK(calloc, calloc(1, size))
LEAK(realloc, realloc(malloc(10), size))
#ifdef REALLOCARRAY
LEAK(reallocarray, reallocarray(NULL, 1, size))
#endif
LEAK(posix_memalign, aligned())
LEAK(aligned_alloc, aligned_alloc(64, size))
LEAK(memalign, memalign(64, size))
LEAK(mmap, mmap(NULL, size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))
LEAK(mremap, moved_mapping())
#ifdef __GLIBC__
LEAK(valloc, valloc(size))
#endif
#ifdef PVALLOC
LEAK(pvalloc, pvalloc(size))
#endif

static const struct {
	const char *name;
	void (*leak)(void);
} leaks[] = {
	{ "malloc", leak_malloc },
	{ "calloc", leak_calloc },
	{ "realloc", leak_realloc },
#ifdef REALLOCARRAY
	{ "reallocarray", leak_reallocarray },
#endif
	{ "posix_memalign", leak_posix_memalign },
	{ "aligned_alloc", leak_aligned_alloc },
	{ "memalign", leak_memalign },
	{ "mmap", leak_mmap },
	{ "mremap", leak_mremap },
#ifdef __GLIBC__
	{ "valloc", leak_valloc },
#endif
#ifdef PVALLOC
	{ "pvalloc", leak_pvalloc },
#endif
};

#define LEAKS (sizeof(leaks) / sizeof(*leaks))

STEP static void leak(const char *kind)
{
	bool found = false;

	for (unsigned long i = 0; i < LEAKS; i++) {
		if (kind && strcmp(kind, leaks[i].name))
			continue;
		leaks[i].leak();
		found = true;
	}
	if (!found)
		die("no kind of allocation is called %s", kind);
}

STEP static void balanced(void)
{
	for (unsigned long i = 0; i < blocks; i++) {
		void *mapped = mmap(NULL, size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		free(malloc(size));
		free(calloc(1, size));
		free(realloc(malloc(10), size));
#ifdef REALLOCARRAY
		free(reallocarray(NULL, 1, size));
#endif
		free(aligned());
		free(aligned_alloc(64, size));
		free(memalign(64, size));
#ifdef __GLIBC__
		free(valloc(size));
#endif
#ifdef PVALLOC
		free(pvalloc(size));
#endif
		munmap(mapped, size);
		munmap(moved_mapping(), 3 * size);
	}
}

/* Keeps 1000 bytes: a block that was grown, in place or not. */
STEP static void realloc_grown(void)
{
	kept = realloc(malloc(100), 1000);
}

/* Keeps 100 bytes. */
STEP static void realloc_shrunk(void)
{
	kept = realloc(malloc(1000), 100);
}

/* Keeps 70 bytes. */
STEP static void realloc_of_nothing(void)
{
	kept = realloc(NULL, 70);
}

/* Keeps nothing with glibc, which frees the block. With other allocators, keeps the smallest
 * possible block. */
STEP static void realloc_to_nothing(void)
{
	kept = realloc(malloc(100), 0);
}

/* Keeps 300 bytes: a realloc that fails leaves the block alone. */
STEP static void realloc_failed(void)
{
	volatile unsigned long half = (unsigned long)-1 / 2;
	void *block = malloc(300);

	if (realloc(block, half))
		die("a realloc of half the address space worked");
	if (reallocarray(block, half, 5))
		die("a reallocarray beyond the address space worked");
	kept = block;
}

STEP static void reallocs(void)
{
	for (unsigned long i = 0; i < blocks; i++) {
		realloc_grown();
		realloc_shrunk();
		realloc_of_nothing();
		realloc_to_nothing();
		realloc_failed();
	}
}

STEP static void failing(void)
{
	volatile unsigned long half = (unsigned long)-1 / 2;
	void *block = NULL;

	for (unsigned long i = 0; i < blocks; i++) {
		kept = malloc(half);
		kept = calloc(half, 5);
		kept = reallocarray(NULL, half, 5);
		if (kept || !posix_memalign(&block, 3, 100))
			die("a call that must fail worked");
		kept = mmap(NULL, 0, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		kept = mremap((void *)PAGE, PAGE, 2 * PAGE, MREMAP_MAYMOVE);
		free(NULL);
	}
}

STEP static void big(void)
{
	for (unsigned long i = 0; i < blocks; i++) {
		kept = malloc(size);
		free(malloc(size));
	}
}

STEP static char *map(unsigned long pages)
{
	return mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

STEP static void map_below_hole(volatile char *hole)
{
	kept = map(256);
	hole[0] = 1;
}

/* What alloca() takes begins where malloc's return address was. */
STEP static void hole(void)
{
	kept = malloc(16);
	map_below_hole(alloca(PAGE));
	free(malloc(24));
}

/* Keeps all but three pages: one at each end and one in the middle. */
STEP static void unmap_parts(unsigned long pages)
{
	char *at = map(pages);

	munmap(at, PAGE);
	munmap(at + (pages / 2) * PAGE, 1);
	munmap(at + (pages - 1) * PAGE, PAGE);
}

/* Keeps all: the unmap fails. */
STEP static void unmap_fails(unsigned long pages)
{
	if (!munmap(map(pages) + 1, PAGE))
		die("an unaligned munmap worked");
}

/* Keeps two pages less, which a second mapping replaces. */
STEP static void replaced(unsigned long pages)
{
	char *at = map(pages);

	mmap(at, 2 * PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}

/* Keeps one page of its mapping, which is shrunk in place. */
STEP static void shrunk(unsigned long pages)
{
	mremap(map(pages), pages * PAGE, PAGE, 0);
}

struct worker {
	unsigned long count, keep;
	void **own, **neighbours;
	pthread_barrier_t *barrier;
};

STEP static void *allocate_in_thread(void)
{
	return malloc(size);
}

static void *work(void *argument)
{
	struct worker *worker = argument;

	pthread_barrier_wait(worker->barrier);
	for (unsigned long i = 0; i < worker->count; i++)
		worker->own[i] = allocate_in_thread();
	pthread_barrier_wait(worker->barrier);
	/* Frees blocks that another thread allocated, mixed with allocations of this thread. */
	for (unsigned long i = worker->keep; i < worker->count; i++) {
		free(worker->neighbours[i]);
		free(allocate_in_thread());
	}
	pthread_barrier_wait(worker->barrier);
	return NULL;
}

STEP static void threads(unsigned long number, unsigned long count, unsigned long keep)
{
	struct worker *workers = calloc(number, sizeof(*workers));
	pthread_t *ids = calloc(number, sizeof(*ids));
	pthread_barrier_t barrier;

	pthread_barrier_init(&barrier, NULL, number);
	for (unsigned long i = 0; i < number; i++)
		workers[i].own = calloc(count, sizeof(void *));
	for (unsigned long i = 0; i < number; i++) {
		workers[i].count = count;
		workers[i].keep = keep;
		workers[i].neighbours = workers[(i + 1) % number].own;
		workers[i].barrier = &barrier;
		if (pthread_create(&ids[i], NULL, work, &workers[i]))
			die("cannot start %lu threads", number);
	}
	for (unsigned long i = 0; i < number; i++)
		pthread_join(ids[i], NULL);
}

/* Pool that hands out its memory from the start on, and never hands out a block again. */
struct pool {
	char room[16 << 20];
	unsigned long used;
};

static struct pool pool;

STEP void *pool_take(struct pool *from, unsigned long bytes)
{
	void *block = from->room + from->used;

	from->used += (bytes + 15) & ~15UL;
	if (from->used > sizeof(from->room))
		die("the pool is empty; use smaller counts");
	return block;
}

STEP int pool_store(struct pool *from, void **block, unsigned long number, unsigned long bytes)
{
	*block = from->room + from->used;
	from->used += (number * bytes + 15) & ~15UL;
	return 0;
}

STEP void *pool_resize(struct pool *from, void *block, unsigned long bytes)
{
	from->used += (bytes + 15) & ~15UL;
	return memmove(from->room + from->used - ((bytes + 15) & ~15UL), block, 1);
}

STEP void pool_give(struct pool *to, void *block)
{
	__asm__ volatile("" : : "r"(to), "r"(block) : "memory");
}

STEP static void leak_taken(void)
{
	for (unsigned long i = 0; i < blocks; i++) {
		kept = pool_take(&pool, size);
		pool_give(&pool, pool_take(&pool, size));
	}
}

STEP static void leak_stored(void)
{
	for (unsigned long i = 0; i < blocks; i++) {
		void *block;

		pool_store(&pool, &block, 2, size);
		kept = block;
	}
}

STEP static void leak_resized(void)
{
	for (unsigned long i = 0; i < blocks; i++)
		kept = pool_resize(&pool, pool_take(&pool, 7), size);
}

/* The recursive call is no tail call, or there would be only one frame. */
STEP static void deep(unsigned long depth)
{
	if (depth)
		deep(depth - 1);
	else
		kept = malloc(size);
	__asm__ volatile("");
}

/* The bits of `path` choose the functions on the way down. */
STEP static void left(unsigned long path, int bits);
STEP static void right(unsigned long path, int bits);

static void down(unsigned long path, int bits)
{
	if (!bits)
		kept = malloc(32);
	else if (path & 1)
		left(path >> 1, bits - 1);
	else
		right(path >> 1, bits - 1);
}

STEP static void left(unsigned long path, int bits)
{
	down(path, bits);
	__asm__ volatile("");
}

STEP static void right(unsigned long path, int bits)
{
	down(path, bits);
	__asm__ volatile("");
}

static void churn(unsigned long rounds, unsigned long stacks)
{
	for (unsigned long round = 0; round < rounds; round++) {
		for (unsigned long i = 0; i < stacks; i++) {
			down(round * stacks + i, 20);
			if (i)
				free(kept);
		}
		if (round + 1 < rounds)
			ready();
	}
}

static void *renamed(void *unused)
{
	prctl(PR_SET_NAME, "renamed");
	ready();
	leak_malloc();
	return unused;
}

static void rename_thread(void)
{
	pthread_t thread;

	if (pthread_create(&thread, NULL, renamed, NULL))
		die("no thread");
	pthread_join(thread, NULL);
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	bool one = !strcmp(what, "one");
	/* The numbers follow the kind, if there is one. */
	char **number = argv + (one ? 3 : 2);
	int numbers = argc - (one ? 3 : 2);

	blocks = numbers > 0 ? count(number[0]) : 0;
	size = numbers > 1 ? count(number[1]) : 0;
	ready();
	if (!strcmp(what, "leak") && numbers == 2) {
		leak(NULL);
	} else if (one && numbers == 2) {
		leak(argv[2]);
	} else if (!strcmp(what, "balanced") && numbers == 2) {
		balanced();
	} else if (!strcmp(what, "mixed") && numbers == 2) {
		leak(NULL);
		balanced();
	} else if (!strcmp(what, "realloc") && numbers == 1) {
		reallocs();
	} else if (!strcmp(what, "failing") && numbers == 1) {
		failing();
	} else if (!strcmp(what, "big") && numbers == 2) {
		big();
	} else if (!strcmp(what, "hole") && numbers == 1) {
		for (unsigned long i = 0; i < blocks; i++)
			hole();
	} else if (!strcmp(what, "munmap") && numbers == 1) {
		unmap_parts(blocks);
		unmap_fails(blocks);
		replaced(blocks);
		shrunk(blocks);
	} else if (!strcmp(what, "threads") && numbers == 4) {
		size = count(number[3]);
		threads(blocks, count(number[1]), count(number[2]));
	} else if (!strcmp(what, "pool") && numbers == 2) {
		leak_taken();
		leak_stored();
		leak_resized();
	} else if (!strcmp(what, "deep") && numbers == 2) {
		deep(blocks);
	} else if (!strcmp(what, "stacks") && numbers == 1) {
		for (unsigned long i = 0; i < blocks; i++)
			down(i, 16);
	} else if (!strcmp(what, "churn") && numbers == 2) {
		churn(blocks, size);
	} else if (!strcmp(what, "renamed") && numbers == 2) {
		rename_thread();
	} else if (strcmp(what, "hold")) {
		usage("leak|one KIND|balanced|mixed|realloc|failing|big|munmap|threads|pool|deep|"
		      "stacks|churn|renamed|hold NUMBER...");
	}
	done();
	return 0;
}
