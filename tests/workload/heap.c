/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * A heap with all kinds of chunks. Once it is made, the program waits.
 *
 *	heap THREADS STEPS KIND
 *
 * Each thread takes STEPS steps of malloc, calloc, realloc, posix_memalign and
 * free, of sizes from none to a megabyte. One thread in four ends, the others wait.
 * KIND is what happens in addition:
 *
 *	plain	 nothing
 *	brk	 the heap cannot grow by brk(2) from the middle on
 *	foreign	 other code moves the end of the heap, by sbrk(3)
 *	churn	 the threads go on for ever
 *	busy	 the threads go on for ever, and leak nothing before
 *	corrupt	 a chunk's header is overwritten; its address is a fact
 *	holes	 STEPS blocks of 1000 bytes, of which one in 97 is left; malloc_trim()
 *		 is the work, and the memory that it returned a fact, in kB
 *	shared	 64 MB of shared memory are mapped, whose pages only another process
 *		 has; the work is to count the pages that this process has
 *	vfork	 the work is to wait, in vfork(2), until somebody kills the child
 *	stats	 as plain; the work is to read jemalloc's own statistics, which are facts
 *	strict	 under seccomp's strict mode, from ready on
 *	leaderless  the main thread ends, and a thread that allocates nothing goes on
 */
#define _GNU_SOURCE
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <signal.h>
#include <sys/wait.h>
#include "workload.h"

#define MEGABYTE  (1UL << 20)
#define SLOTS	  3000
#define EXCHANGED 1024

static unsigned long threads, steps;
static const char *kind;
static pthread_barrier_t all_done;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *exchanged[EXCHANGED];

struct worker {
	pthread_t thread;
	unsigned long number;
	uint64_t seed;
	void **slot;
};

static uint64_t random_number(uint64_t *seed)
{
	*seed ^= *seed << 13;
	*seed ^= *seed >> 7;
	*seed ^= *seed << 17;
	return *seed;
}

static size_t random_size(uint64_t *seed)
{
	uint64_t part = random_number(seed) % 1000;
	uint64_t number = random_number(seed);

	if (part < 700)
		return number % 256;
	if (part < 900)
		return number % 2048;
	if (part < 980)
		return number % 20000;
	if (part < 997)
		return number % 120000;
	return 130000 + number % 1000000;
}

STEP static void work(struct worker *worker, unsigned long count)
{
	uint64_t *seed = &worker->seed;

	while (count--) {
		void **slot = &worker->slot[random_number(seed) % SLOTS];
		uint64_t part = random_number(seed) % 100;
		size_t size = random_size(seed);

		if (part < 45) {
			free(*slot);
			*slot = malloc(size);
			if (size)
				memset(*slot, 0x5a, size < 64 ? size : 64);
		} else if (part < 55) {
			free(*slot);
			*slot = calloc(1, size);
		} else if (part < 65) {
			*slot = realloc(*slot, size + 1);
		} else if (part < 68) {
			free(*slot);
			if (posix_memalign(slot, 16UL << random_number(seed) % 14, size))
				*slot = NULL;
		} else if (part < 70) {
			void **other = &exchanged[random_number(seed) % EXCHANGED];
			void *block;

			pthread_mutex_lock(&lock);
			block = *other;
			*other = *slot;
			*slot = block;
			pthread_mutex_unlock(&lock);
		} else {
			free(*slot);
			*slot = NULL;
		}
	}
}

/* Allocates more blocks of each small size than a thread's cache holds: freed ones then go to
 * fastbins. */
STEP static void fill_fastbins(void)
{
	void *block[40];

	if (!strcmp(kind, "busy"))
		return;
	for (size_t size = 24; size <= 120; size += 16) {
		for (int i = 0; i < 40; i++)
			block[i] = malloc(size);
		for (int i = 0; i < 40; i++)
			if (i % 3)
				free(block[i]);
	}
}

static void *run(void *argument)
{
	struct worker *worker = argument;

	worker->slot = calloc(SLOTS, sizeof(void *));
	work(worker, steps);
	fill_fastbins();
	if (worker->number % 4 == 3)
		return NULL;
	pthread_barrier_wait(&all_done);
	while (!strcmp(kind, "churn") || !strcmp(kind, "busy"))
		work(worker, 1000);
	for (;;)
		pause();
}

static void start_threads(void)
{
	struct worker *worker = calloc(threads + 1, sizeof(*worker));
	struct worker *own = &worker[threads];
	unsigned long staying = 0;

	own->seed = 0x9e3779b97f4a7c15;
	own->slot = calloc(SLOTS, sizeof(void *));
	work(own, steps / 2);
	if (!strcmp(kind, "brk")) {
		uintptr_t after = ((uintptr_t)sbrk(0) + 0x3fff) & ~0xfffUL;

		if (mmap((void *)after, PAGE, PROT_NONE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == MAP_FAILED)
			die("cannot map the page after the heap: %s", strerror(errno));
	}
	for (int i = 0; !strcmp(kind, "foreign") && i < 3; i++) {
		memset(sbrk(5000 + i), 0x41, 5000);
		work(own, steps / 4);
	}
	work(own, steps / 2);
	fill_fastbins();
	for (unsigned long i = 0; i < threads; i++)
		staying += i % 4 != 3;
	pthread_barrier_init(&all_done, NULL, staying + 1);
	for (unsigned long i = 0; i < threads; i++) {
		worker[i].number = i;
		worker[i].seed = own->seed + (i + 1) * 1234567891011;
		if (pthread_create(&worker[i].thread, NULL, run, &worker[i]))
			die("cannot start a thread");
	}
	for (unsigned long i = 0; i < threads; i++)
		if (i % 4 == 3)
			pthread_join(worker[i].thread, NULL);
	pthread_barrier_wait(&all_done);
	usleep(100000);
}

/* Returns a number of /proc/self/status, in kB. */
static long status(const char *name)
{
	static char text[8192];
	int fd = open("/proc/self/status", O_RDONLY);
	ssize_t length = read(fd, text, sizeof(text) - 1);
	char *line;

	close(fd);
	text[length > 0 ? length : 0] = 0;
	line = strstr(text, name);
	return line ? atol(line + strlen(name)) : -1;
}

static void corrupt(void)
{
	char *block[1009];

	for (int i = 0; i < 1009; i++)
		block[i] = malloc(100);
	memset(block[503], 0x5a, 120);
	ready();
	fact("header", "%p", (void *)(block[503] + 96));
}

static void holes(void)
{
	char **block = malloc(steps * sizeof(*block));
	long before;

	/* Pages that khugepaged makes while the heap is examined count as written. */
	if (prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0))
		die("cannot do without huge pages: %s", strerror(errno));
	for (unsigned long i = 0; i < steps; i++) {
		block[i] = malloc(1000);
		memset(block[i], 1, 1000);
	}
	for (unsigned long i = 0; i < steps; i++)
		if (i % 97)
			free(block[i]);
	ready();
	before = status("RssAnon:");
#ifdef __GLIBC__
	malloc_trim(0);
#endif
	fact("returned", "%ld", before - status("RssAnon:"));
}

/* Returns the number of pages that are in this process's page table. */
static long mapped_pages(const void *memory, size_t size)
{
	static uint64_t entries[64 * MEGABYTE / PAGE];
	const size_t count = size / PAGE;
	const off_t at = (uintptr_t)memory / PAGE * sizeof(*entries);
	int fd = open("/proc/self/pagemap", O_RDONLY);
	long pages = 0;

	if (fd < 0 ||
	    pread(fd, entries, count * sizeof(*entries), at) != (ssize_t)(count * sizeof(*entries)))
		die("no pagemap: %s", strerror(errno));
	for (size_t i = 0; i < count; i++)
		pages += entries[i] >> 63;
	return pages;
}

static void shared(void)
{
	size_t size = 64 * MEGABYTE;
	void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pid_t child;

	if (memory == MAP_FAILED)
		die("cannot map %zu bytes: %s", size, strerror(errno));
	free(malloc(1));
	child = fork();
	if (!child) {
		memset(memory, 1, size);
		_exit(0);
	}
	waitpid(child, NULL, 0);
	ready();
	fact("shared", "%ld", mapped_pages(memory, size));
}

/* Function of jemalloc, if the program runs with it. */
__attribute__((weak)) int mallctl(const char *name, void *old, size_t *length, void *new,
				  size_t new_length);

static size_t statistic(const char *name)
{
	size_t value = 0, length = sizeof(value);

	if (mallctl(name, &value, &length, NULL, 0))
		die("no %s", name);
	return value;
}

static void tell_statistics(void)
{
	uint64_t epoch = 1;

	if (!mallctl)
		die("there is no jemalloc");
	mallctl("epoch", NULL, NULL, &epoch, sizeof(epoch));
	fact("allocated", "%zu", statistic("stats.allocated"));
	fact("active", "%zu", statistic("stats.active"));
	fact("retained", "%zu", statistic("stats.retained"));
	fact("dirty", "%zu", statistic("stats.arenas.4096.pdirty") * PAGE);
	fact("muzzy", "%zu", statistic("stats.arenas.4096.pmuzzy") * PAGE);
	fact("caches", "%zu", statistic("stats.arenas.4096.tcache_bytes"));
	fact("resident", "%zu", statistic("stats.resident"));
	fact("base", "%zu", statistic("stats.arenas.4096.base"));
}

/* Waits in vfork(2): the parent sleeps uninterruptibly while the child lives. */
static void wait_in_vfork(void)
{
	pid_t child;

	free(malloc(1));
	ready();
	child = vfork();
	if (!child) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		for (;;)
			pause();
	}
	waitpid(child, NULL, 0);
	fact("waited", "%d", 1);
}

/* Does the work of ready(), in strict mode, which permits only to read, to write, and to end
 * the calling thread. */
__attribute__((noreturn)) static void be_strict(void)
{
	char text[32];
	int length = snprintf(text, sizeof(text), "ready %d\n", getpid());

	if (prctl(PR_SET_SECCOMP, 1 /* strict */))
		die("no seccomp: %s", strerror(errno));
	say(text, length);
	wait_for_line();
	done();
	syscall(SYS_exit, 0);
	__builtin_unreachable();
}

/* Waits until the kernel has released the main thread's memory: its size is 0 then. */
static void *go_on(void *unused)
{
	char path[64], size = '1';

	(void)unused;
	snprintf(path, sizeof(path), "/proc/%d/statm", getpid());
	while (size != '0') {
		int fd = open(path, O_RDONLY);

		if (fd < 0 || read(fd, &size, 1) != 1)
			die("cannot read %s", path);
		close(fd);
		usleep(1000);
	}
	ready();
	done();
	_exit(0);
}

/* Leaves the process to a thread that has no cache of free blocks. */
__attribute__((noreturn)) static void end_main_thread(void)
{
	pthread_t other;

	if (pthread_create(&other, NULL, go_on, NULL))
		die("cannot start a thread");
	pthread_exit(NULL);
}

int main(int argc, char **argv)
{
	if (argc != 4)
		usage("THREADS STEPS KIND");
	threads = count(argv[1]);
	steps = count(argv[2]);
	kind = argv[3];
	if (!strcmp(kind, "corrupt")) {
		corrupt();
	} else if (!strcmp(kind, "holes")) {
		holes();
	} else if (!strcmp(kind, "shared")) {
		shared();
	} else if (!strcmp(kind, "vfork")) {
		wait_in_vfork();
	} else {
		/* A larger block has a mapping of its own, however often such a block is freed. */
#ifdef __GLIBC__
		mallopt(M_MMAP_THRESHOLD, 128 << 10);
#endif
		start_threads();
		if (!strcmp(kind, "strict"))
			be_strict();
		if (!strcmp(kind, "leaderless"))
			end_main_thread();
		ready();
		if (!strcmp(kind, "stats"))
			tell_statistics();
	}
	done();
	_exit(0);
}
