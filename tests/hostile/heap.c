/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * A process with a damaged or forged heap, or one that forks, executes itself or starts threads
 * while a tool looks at it.
 *
 *	hostile-heap KIND
 *
 * KIND is what is wrong:
 *
 *	size	 a chunk has 1 TB; the address of its header is a fact
 *	tcache	 the list of a thread's cache leads back to its first chunk
 *	fastbin	 the list of a fastbin leads back to its first chunk
 *	bin	 a chunk in a bin refers to itself
 *	mapped	 64 MB of pages that begin like chunks of 64 TB with mappings of their own
 *	ring	 the arenas lead to forged ones, which lead to each other
 *	heaps	 the heaps of a thread's arena are thousands of overlapping ones
 *	noise	 20011 blocks contain addresses of each other, of code and of nothing, and lengths
 *	ring-of-blocks	 300007 blocks refer to the next in a ring that nothing refers to
 *	twice	 a second C library has a heap, too
 *	forks	 children start and end all the time; their number is a fact
 *	execs	 the program executes itself all the time; the number of executions is a fact
 *	threads	 threads start and end all the time; their number is a fact
 *
 * Once a list is damaged, the program does not call malloc any more. In the end, the program counts
 * to 1009 by itself, and prints that as a fact: it was not harmed.
 */
#include "../workload/wipe.h"
#include "hostile.h"
#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>

#define BLOCKS 1009
#define TB     (1UL << 40)

static char *block[BLOCKS];

/* Ends an undamaged program, with its last facts. */
__attribute__((noreturn)) static void end_well(void)
{
	volatile unsigned long counted = 0;

	for (int i = 0; i < 1009; i++)
		counted++;
	fact("counted", "%lu", counted);
	done();
	_exit(0);
}

/* Waits, and ends without doing anything else. */
__attribute__((noreturn)) static void wait_and_end(void)
{
	ready();
	end_well();
}

static bool is_asked(void)
{
	struct pollfd input = { .fd = 0, .events = POLLIN };

	return poll(&input, 1, 0) == 1;
}

static void fill(size_t size)
{
	for (int i = 0; i < BLOCKS; i++)
		block[i] = malloc(size);
}

/* Returns a link of a list, encoded as glibc does since 2.32. */
static uint64_t mangled(void *at, void *to)
{
	return (uint64_t)at >> 12 ^ (uint64_t)to;
}

static void tcache(void)
{
	fill(40);
	for (int i = 0; i < 3; i++)
		free(block[i]);
	/* The block that was freed first is the last one of the list. */
	*(uint64_t *)block[0] = mangled(block[0], block[2]);
}

static void fastbin(void)
{
	fill(40);
	for (int i = 0; i < 10; i++)
		free(block[i]);
	/* The first seven freed blocks are in the thread's cache. */
	*(uint64_t *)block[7] = mangled(block[7], block[9] - 16);
}

static void bin(void)
{
	uint64_t *links;

	fill(3000);
	free(block[500]);
	links = (uint64_t *)block[500];
	links[0] = links[1] = (uint64_t)(links - 2);
}

static char *map(size_t size)
{
	char *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		die("cannot map %zu bytes: %s", size, strerror(errno));
	return memory;
}

static void mapped(void)
{
	size_t size = 64UL << 20;
	char *memory = map(size);

	fill(100);
	for (size_t at = 0; at < size; at += PAGE)
		((uint64_t *)(memory + at))[1] = 64 * TB | 2;
}

static uint64_t arena, arena_next;

static void *use_arena(void *unused)
{
	(void)unused;
	/* The thread's own arena is at the start of its heap. */
	char *own = malloc(100);
	uint64_t *heap = (uint64_t *)((uint64_t)own & ~((64UL << 20) - 1));

	arena = heap[0];
	for (int i = 0; i < 100; i++)
		own = malloc(1000);
	asm volatile("" ::"r"(own));
	for (;;)
		pause();
	return NULL;
}

static void start_arena(void)
{
	pthread_t thread;

	fill(100);
	pthread_create(&thread, NULL, use_arena, NULL);
	while (!*(volatile uint64_t *)&arena)
		usleep(1000);
	usleep(100000);
	/* The link to the next arena follows the top chunk, the last remainder, 127 bins and
	 * their bitmap. */
	arena_next = arena + 0x70 + 127 * 16 + 16;
}

static void ring(void)
{
	char *forged = map(3 * PAGE);

	start_arena();
	for (int i = 0; i < 3; i++) {
		char *page = forged + i * PAGE;

		*(uint64_t *)page = (uint64_t)page + 0x30;
		*(uint64_t *)(page + 0x30 + arena_next - arena) =
		    (uint64_t)forged + (i + 1) % 3 * PAGE + 0x30;
	}
	*(uint64_t *)arena_next = (uint64_t)forged + 0x30;
	fact("broken", "%p", (void *)(forged + 2 * PAGE + 0x30 + (arena_next - arena)));
}

/* Each page begins a heap of chunks of 32 bytes, which extends to a fence that many heaps share. */
static void heaps(void)
{
	const size_t size = 32UL << 20, step = 512UL << 10;
	char *memory = map(size + step);
	uint64_t *top;

	memory = (char *)(((uint64_t)memory + step - 1) & ~(step - 1));
	start_arena();
	for (size_t at = 0x18; at < size; at += 32)
		*(uint64_t *)(memory + at) = 0x21;
	for (size_t at = step; at <= size; at += step)
		*(uint64_t *)(memory + at - 8) = 0;
	for (size_t at = 0; at < size; at += PAGE) {
		uint64_t *heap = (uint64_t *)(memory + at);

		heap[0] = arena;
		heap[1] = (uint64_t)(at ? memory + at - PAGE : memory);
		heap[2] = step - at % step;
	}
	top = (uint64_t *)(memory + size - PAGE + 0x30);
	*(uint64_t **)(arena + 0x60) = top;
}

static void noise(void)
{
	static char *blocks[20011];
	uint64_t seed = 0x9e3779b97f4a7c15;
	const int count = sizeof(blocks) / sizeof(*blocks);

	for (int i = 0; i < count; i++)
		blocks[i] = malloc(24 + i % 400);
	for (int i = 0; i < count; i++) {
		for (int at = 0; at + 8 <= 24 + i % 400; at += 8) {
			uint64_t word;

			seed ^= seed << 13;
			seed ^= seed >> 7;
			seed ^= seed << 17;
			switch (seed % 7) {
			case 0:
				word = (uint64_t)blocks[seed / 7 % count];
				break;
			case 1:
				word = (uint64_t)blocks[seed / 7 % count] + 8;
				break;
			case 2:
				word = (uint64_t)&noise + seed / 7 % 4096;
				break;
			case 3:
				word = seed / 7 % 64;
				break;
			case 4:
				word = UINT64_MAX - seed / 7 % 64;
				break;
			case 5:
				word = 1UL << seed / 7 % 64;
				break;
			default:
				word = (uint64_t)stdin - seed / 7 % 4096;
			}
			*(uint64_t *)(blocks[i] + at) = word;
		}
	}
}

static void ring_of_blocks(void)
{
	void **first = malloc(24), **last = first;

	for (int i = 1; i < 300007; i++) {
		*last = malloc(24);
		last = *last;
	}
	*last = first;
}

static void twice(void)
{
	void *library = dlmopen(LM_ID_NEWLM, "libc.so.6", RTLD_NOW);
	void *(*other_malloc)(size_t) =
	    library ? (void *(*)(size_t))dlsym(library, "malloc") : NULL;

	if (!other_malloc)
		die("no second C library: %s", dlerror());
	fill(100);
	for (int i = 0; i < BLOCKS; i += 2)
		block[i] = other_malloc(100);
}

__attribute__((noreturn)) static void fork_for_ever(void)
{
	unsigned long forks = 0;

	fill(100);
	ready();
	while (!is_asked()) {
		pid_t child = fork();

		if (!child)
			_exit(0);
		forks += child > 0;
		waitpid(child, NULL, 0);
	}
	fact("forks", "%lu", forks);
	end_well();
}

__attribute__((noreturn)) static void exec_for_ever(unsigned long execs)
{
	char number[32];

	fill(100);
	if (!execs)
		ready();
	if (is_asked()) {
		wait_for_line();
		fact("execs", "%lu", execs);
		end_well();
	}
	snprintf(number, sizeof(number), "%lu", execs + 1);
	execl("/proc/self/exe", "hostile-heap", "execs", number, NULL);
	die("cannot start anew: %s", strerror(errno));
}

static void *use_heap(void *unused)
{
	free(malloc(1000));
	return unused;
}

__attribute__((noreturn)) static void start_threads_for_ever(void)
{
	unsigned long threads = 0;

	fill(100);
	ready();
	while (!is_asked()) {
		pthread_t thread;

		if (pthread_create(&thread, NULL, use_heap, NULL))
			die("cannot start a thread");
		pthread_join(thread, NULL);
		threads++;
	}
	fact("threads", "%lu", threads);
	end_well();
}

static void size(void)
{
	fill(100);
	((uint64_t *)block[503])[-1] = TB | 1;
	fact("header", "%p", (void *)(block[503] - 16));
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*make)(void);
	} kinds[] = {
		{ "size", size },	{ "tcache", tcache },
		{ "fastbin", fastbin }, { "bin", bin },
		{ "mapped", mapped },	{ "ring", ring },
		{ "heaps", heaps },	{ "noise", noise },
		{ "twice", twice },	{ "ring-of-blocks", ring_of_blocks },
	};
	const char *kind = argc > 1 ? argv[1] : "";

	drop_root();
	if (!strcmp(kind, "forks"))
		fork_for_ever();
	if (!strcmp(kind, "execs"))
		exec_for_ever(argc > 2 ? count(argv[2]) : 0);
	if (!strcmp(kind, "threads"))
		start_threads_for_ever();
	for (size_t i = 0; i < sizeof(kinds) / sizeof(*kinds); i++) {
		if (!strcmp(kind, kinds[i].name)) {
			kinds[i].make();
			wipe();
			wait_and_end();
		}
	}
	usage("KIND");
}
