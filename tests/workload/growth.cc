/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Programs whose memory behaves as their label says, for as long as they run.
 *
 *	growth LABEL MILLISECONDS SEED
 *
 * After the first line they work in rounds of 10 ms, until there is another
 * line. SEED determines rates and sizes. Work that ends does so within MILLISECONDS.
 *
 *	leak	   loses requests, which nothing refers to
 *	unbounded  puts sessions into a map, and never takes one out
 *	lru	   has a cache of 3001 items, in which each new item replaces the oldest one
 *	warm-up	   fills a table in the first quarter of the time
 *	burst	   has blocks for a third of the time, and frees them
 *	arenas	   starts threads, each of which leaves an arena that is nearly all free
 *	forks	   starts children that allocate and exit
 *	protected  loses requests, and has written memory that it may not read
 *	mapped	   maps private memory, and writes it
 *	shared	   maps shared memory, and writes it
 *	idle	   does nothing
 *
 * The facts are the number of blocks that are lost or held in the end, and the
 * milliseconds that the work took.
 */
#include <deque>
#include <malloc.h>
#include <map>
#include <memory>
#include <poll.h>
#include <pthread.h>
#include <string>
#include <time.h>
#include <vector>

#include "workload.h"

namespace shop
{
struct base {
	virtual ~base() = default;
	unsigned long id = 0;
};
struct request : base {
	char body[200];
};
struct session : base {
	std::string user;
	std::vector<int> numbers;
};
struct item : base {
	char body[104];
};
struct entry : base {
	char body[488];
};
} // namespace shop

static unsigned long seed, length, blocks;
static std::map<unsigned long, std::unique_ptr<shop::session>> sessions;
static std::deque<std::unique_ptr<shop::item>> cache;
static std::vector<std::unique_ptr<shop::entry>> entries;

static unsigned long milliseconds()
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000UL + now.tv_nsec / 1000000;
}

/* Returns a number from low to high, the same in each run with the seed. */
static unsigned long between(unsigned long low, unsigned long high)
{
	seed = seed * 6364136223846793005UL + 1442695040888963407UL;
	return low + (seed >> 33) % (high - low + 1);
}

STEP static void lose(unsigned long count)
{
	for (unsigned long i = 0; i < count; i++) {
		shop::request *request = new shop::request;

		request->id = blocks++;
		asm volatile("" : : "r"(request) : "memory");
	}
}

/* Overwrites memory in which addresses of lost blocks may be left. */
STEP static void forget()
{
	volatile char old[8192];

	for (unsigned long i = 0; i < sizeof(old); i++)
		old[i] = 0;
}

STEP static void keep(unsigned long count)
{
	for (unsigned long i = 0; i < count; i++) {
		auto session = std::make_unique<shop::session>();

		session->id = blocks;
		session->user = "the name of user number " + std::to_string(blocks);
		session->numbers.resize(20);
		sessions[blocks++] = std::move(session);
	}
}

STEP static void replace(unsigned long count)
{
	for (unsigned long i = 0; i < count; i++) {
		cache.push_back(std::make_unique<shop::item>());
		if (cache.size() > 3001)
			cache.pop_front();
	}
	blocks = cache.size();
}

STEP static void fill(unsigned long to)
{
	while (entries.size() < to)
		entries.push_back(std::make_unique<shop::entry>());
	blocks = entries.size();
}

/* Frees all blocks of the thread's arena but the last one, so that no memory is returned to the
 * kernel. */
static void *leave_arena(void *argument)
{
	std::vector<char *> freed;

	for (unsigned long i = 0; i < (unsigned long)argument; i++) {
		freed.push_back((char *)malloc(1000));
		memset(freed.back(), 1, 1000);
	}
	char *volatile last = (char *)malloc(1000);
	for (char *block : freed)
		free(block);
	while (last)
		pause();
	return NULL;
}

/* Starts a thread, which has an arena of its own. */
STEP static void start_thread(unsigned long count)
{
	pthread_t thread;

	errno = pthread_create(&thread, NULL, leave_arena, (void *)count);
	if (errno)
		die("cannot start a thread: %s", strerror(errno));
	blocks++;
}

STEP static void start_child(unsigned long megabytes)
{
	pid_t child = fork();

	if (child == 0) {
		for (unsigned long i = 0; i < megabytes; i++)
			memset(malloc(1000000), 1, 1000000);
		usleep(50000);
		_exit(0);
	}
	if (child < 0)
		die("cannot start a child: %s", strerror(errno));
	while (waitpid(-1, NULL, WNOHANG) > 0)
		;
	blocks++;
}

/* Writes a page, and protects it from being read. */
static void protect_page()
{
	size_t bytes = sysconf(_SC_PAGESIZE);
	void *page = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (page == MAP_FAILED)
		die("mmap: %s", strerror(errno));
	memset(page, 1, bytes);
	if (mprotect(page, bytes, PROT_NONE))
		die("mprotect: %s", strerror(errno));
}

/* Whether the test has ended the work. Waits for up to 10 ms. */
static bool is_enough()
{
	struct pollfd input = { 0, POLLIN, 0 };

	return poll(&input, 1, 10) > 0;
}

static STEP void map_and_write(int kind)
{
	void *at = mmap(nullptr, 16 * PAGE, PROT_READ | PROT_WRITE, kind | MAP_ANONYMOUS, -1, 0);

	if (at == MAP_FAILED)
		die("cannot map: %s", strerror(errno));
	memset(at, 1, 16 * PAGE);
	blocks++;
}

int main(int argc, char **argv)
{
	if (argc != 4)
		usage("LABEL MILLISECONDS SEED");
	std::string label = argv[1];
	length = count(argv[2]);
	seed = count(argv[3]);
	if (!mallopt(M_ARENA_MAX, 64))
		die("cannot have as many arenas");
	unsigned long rate = between(11, 60), size = between(4001, 20011);
	unsigned long begin_at = between(length / 8, length / 4);

	/* Blocks of a program that has run for a while. */
	fill(between(2003, 8009));
	unsigned long had = entries.size();
	replace(3001);
	blocks = 0;
	if (label == "protected")
		protect_page();
	ready();
	unsigned long start = milliseconds();
	for (unsigned long round = 0; !is_enough(); round++) {
		unsigned long now = milliseconds() - start;

		if (label == "leak" || label == "protected") {
			lose(rate);
			forget();
		} else if (label == "unbounded") {
			keep(rate);
		} else if (label == "lru") {
			replace(rate);
		} else if (label == "warm-up") {
			unsigned long part = std::min(now, begin_at);

			fill(had + size * part / begin_at);
		} else if (label == "burst") {
			if (now > begin_at && now < begin_at + length / 3)
				fill(had + size);
			else if (now > begin_at)
				entries.resize(had);
		} else if (label == "arenas") {
			if (now * 20 / length > blocks)
				start_thread(size / 10);
		} else if (label == "forks") {
			if (round % 8 == 0)
				start_child(rate / 10);
		} else if (label == "mapped" || label == "shared") {
			map_and_write(label == "shared" ? MAP_SHARED : MAP_PRIVATE);
		} else if (label != "idle") {
			die("no label '%s'", label.c_str());
		}
	}
	unsigned long took = milliseconds() - start;
	wait_for_line();
	fact("blocks", "%lu", blocks);
	fact("milliseconds", "%lu", took);
	done();
	return 0;
}
