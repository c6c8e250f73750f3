/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Programs whose memory behaves as their label says, for as long as they run.
 *
 *	growth LABEL MILLISECONDS SEED
 *
 * After the first line they work in rounds of 10 ms, until there is another
 * line. SEED determines rates and sizes. Work that ends does so within MILLISECONDS.
 *
 *	leak		 loses requests, which nothing refers to
 *	leak-medium	 loses blocks of some tens of kilobytes
 *	leak-large	 loses blocks that malloc maps one by one
 *	leak-thread	 loses requests in a second thread, from its own arena
 *	leak-churn	 loses requests, while most blocks are replaced, as by lru
 *	leak-part	 puts sessions into a map, and loses a few requests
 *	leak-fragments	 loses requests, and leaves holes, as by fragments
 *	unbounded	 puts sessions into a map, and never takes one out
 *	deque		 appends numbers to a container
 *	vector		 makes a single block larger by realloc()
 *	lru		 has a cache of 3001 items, in which each new item replaces the oldest one
 *	sawtooth	 fills a table, and empties it, again and again
 *	warm-up		 fills a table in the first quarter of the time
 *	burst		 has blocks for a third of the time, and frees them
 *	touch		 writes to a huge block, page after page, for the first time
 *	fragments	 leaves holes that are too small for what comes next
 *	fragments-large	 the same, with blocks of many pages
 *	retained	 allocates more in each round, and frees all but the last block
 *	arenas		 starts threads, each of which leaves an arena that is nearly all free
 *	threads		 starts threads, which write to their stacks
 *	stack		 calls itself ever deeper
 *	forks		 starts children that allocate and exit
 *	protected	 loses requests, and has written memory that it may not read
 *	break		 moves the end of the heap by sbrk()
 *	mapped		 maps private memory, and writes it
 *	huge		 the same, with transparent huge pages
 *	shared		 maps shared memory, and writes it
 *	shm		 attaches System V segments, and writes them
 *	memfd		 writes a file without a name that it has mapped
 *	file		 writes a file in the current folder that it has mapped
 *	copied		 maps a file in the current folder for itself alone, and writes its copy
 *	idle		 does nothing
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
#include <sys/ipc.h>
#include <sys/shm.h>
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

/* What main() has drawn by the seed: blocks of each round, blocks in all, and when that begins. */
static unsigned long rate, size, begin_at, had;
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

/* Writes to memory that is to be resident. */
static void *written(void *at, unsigned long bytes)
{
	if (at == MAP_FAILED)
		die("cannot map: %s", strerror(errno));
	memset(at, 1, bytes);
	return at;
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

	if (mprotect(written(page, bytes), bytes, PROT_NONE))
		die("mprotect: %s", strerror(errno));
}

/* Whether the test has ended the work. Waits for up to 10 ms. */
static bool is_enough()
{
	struct pollfd input = { 0, POLLIN, 0 };

	return poll(&input, 1, 10) > 0;
}

STEP static void lose_bytes(unsigned long bytes)
{
	void *block = written(malloc(bytes), bytes);

	blocks++;
	KEEP(block);
}

static void *lose_for_ever(void *)
{
	for (;;) {
		lose(rate);
		forget();
		usleep(10000);
	}
}

/* Shrinks blocks that are between others. The next block does not fit into what is left of each. */
STEP static void leave_holes(unsigned long count, unsigned long bytes)
{
	static std::deque<void *> kept(1);

	for (unsigned long i = 0; i < count; i++) {
		kept.push_back(written(malloc(bytes), bytes));
		void *&before = kept[kept.size() - 2];
		before = realloc(before, 24);
		blocks++;
	}
}

STEP static void allocate_and_free(unsigned long count)
{
	std::vector<void *> freed;
	static std::vector<void *> kept;

	freed.reserve(count);
	for (unsigned long i = 0; i < count; i++)
		freed.push_back(written(malloc(1000), 1000));
	kept.push_back(written(malloc(1000), 1000));
	for (void *block : freed)
		free(block);
}

STEP static void append(unsigned long count)
{
	static std::deque<unsigned long> numbers;

	while (count--)
		numbers.push_back(blocks++);
}

STEP static void extend()
{
	static char *block;

	blocks++;
	block = (char *)written(realloc(block, blocks * 32768), blocks * 32768);
}

STEP static void touch_more()
{
	static char *block = (char *)malloc(1UL << 30);

	memset(block + blocks++ * 65536, 1, 65536);
}

static void *write_stack(void *)
{
	volatile char array[200000];

	for (unsigned long i = 0; i < sizeof(array); i++)
		array[i] = 1;
	for (;;)
		pause();
}

/* Starts a thread that does not end. */
static void start_thread(void *(*run)(void *), unsigned long argument)
{
	pthread_t thread;

	errno = pthread_create(&thread, NULL, run, (void *)argument);
	if (errno)
		die("cannot start a thread: %s", strerror(errno));
	blocks++;
}

/* Calls itself every ten milliseconds, as often as the argument says. */
static void *descend(void *more)
{
	volatile char array[16384];

	for (unsigned long i = 0; i < sizeof(array); i++)
		array[i] = 1;
	usleep(10000);
	return more ? (char *)descend((char *)more - 1) + array[0] : nullptr;
}

static void deepen()
{
	pthread_attr_t attributes;
	pthread_t thread;

	if (pthread_attr_init(&attributes) || pthread_attr_setstacksize(&attributes, 1UL << 30) ||
	    pthread_create(&thread, &attributes, descend, (void *)60000))
		die("cannot start a thread with a stack of a gigabyte");
}

STEP static void move_break()
{
	written(sbrk(16 * PAGE), 16 * PAGE);
	blocks++;
}

STEP static void map_huge()
{
	static char *next;

	if (!next) {
		char *at = (char *)mmap(NULL, 2048 * HUGE_PAGE, PROT_READ | PROT_WRITE,
					MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (at == MAP_FAILED || madvise(at, 2048 * HUGE_PAGE, MADV_HUGEPAGE))
			die("cannot map huge pages: %s", strerror(errno));
		next = at + HUGE_PAGE - (unsigned long)at % HUGE_PAGE;
	}
	written(next, HUGE_PAGE);
	next += HUGE_PAGE;
	blocks++;
}

/* The segment ends with this process. */
STEP static void attach_segment()
{
	int id = shmget(IPC_PRIVATE, 16 * PAGE, IPC_CREAT | 0600);
	void *at = id < 0 ? MAP_FAILED : shmat(id, NULL, 0);

	written(at, 16 * PAGE);
	shmctl(id, IPC_RMID, NULL);
	blocks++;
}

/* Maps the next part of a file, and writes it. */
STEP static void write_file(int file, int kind)
{
	off_t at = blocks++ * 16 * PAGE;

	if (file < 0 || ftruncate(file, at + 16 * PAGE))
		die("cannot have a file: %s", strerror(errno));
	written(mmap(NULL, 16 * PAGE, PROT_READ | PROT_WRITE, kind, file, at), 16 * PAGE);
}

/* Returns a file in the current folder, which ends with this process. */
static int open_file()
{
	return open(".", O_TMPFILE | O_RDWR, 0600);
}

static STEP void map_and_write(int kind)
{
	written(mmap(nullptr, 16 * PAGE, PROT_READ | PROT_WRITE, kind | MAP_ANONYMOUS, -1, 0),
		16 * PAGE);
	blocks++;
}

/* Work of a round. Each label's begins at "ready", and gets the round's number, and the
 * milliseconds since then. */
struct program {
	const char *label;
	void (*work)(unsigned long round, unsigned long now);
};

static const program programs[] = {
	{ "leak", [](unsigned long, unsigned long) { lose(rate), forget(); } },
	{ "leak-medium",
	  [](unsigned long round, unsigned long) {
		  if (round % 4 == 0)
			  lose_bytes(size * 3), forget();
	  } },
	{ "leak-large",
	  [](unsigned long round, unsigned long) {
		  if (round % 8 == 0)
			  lose_bytes(size * 64), forget();
	  } },
	{ "leak-thread",
	  [](unsigned long round, unsigned long) {
		  if (round == 0)
			  start_thread(lose_for_ever, 0);
	  } },
	{ "leak-churn",
	  [](unsigned long, unsigned long) { replace(10 * rate), lose(rate), forget(); } },
	{ "leak-part", [](unsigned long, unsigned long) { keep(2 * rate), lose(3), forget(); } },
	{ "leak-fragments",
	  [](unsigned long, unsigned long) { leave_holes(5, 2001), lose(3), forget(); } },
	{ "unbounded", [](unsigned long, unsigned long) { keep(rate); } },
	{ "deque", [](unsigned long, unsigned long) { append(100 * rate); } },
	{ "vector", [](unsigned long, unsigned long) { extend(); } },
	{ "lru", [](unsigned long, unsigned long) { replace(rate); } },
	{ "sawtooth",
	  [](unsigned long round, unsigned long) {
		  round % 70 ? fill(entries.size() + rate) : entries.clear();
	  } },
	{ "warm-up",
	  [](unsigned long, unsigned long now) {
		  fill(had + size * std::min(now, begin_at) / begin_at);
	  } },
	{ "burst",
	  [](unsigned long, unsigned long now) {
		  if (now > begin_at && now < begin_at + length / 3)
			  fill(had + size);
		  else if (now > begin_at)
			  entries.resize(had);
	  } },
	{ "touch", [](unsigned long, unsigned long) { touch_more(); } },
	{ "fragments", [](unsigned long, unsigned long) { leave_holes(20, 2001); } },
	{ "fragments-large", [](unsigned long, unsigned long) { leave_holes(1, 40000); } },
	{ "retained", [](unsigned long round, unsigned long) { allocate_and_free(round * 10); } },
	{ "arenas",
	  [](unsigned long, unsigned long now) {
		  if (now * 20 / length > blocks)
			  start_thread(leave_arena, size / 10);
	  } },
	{ "threads",
	  [](unsigned long round, unsigned long) {
		  if (round % 16 == 0)
			  start_thread(write_stack, 0);
	  } },
	{ "stack",
	  [](unsigned long round, unsigned long) {
		  if (round == 0)
			  deepen();
	  } },
	{ "forks",
	  [](unsigned long round, unsigned long) {
		  if (round % 8 == 0)
			  start_child(rate / 10);
	  } },
	{ "protected",
	  [](unsigned long round, unsigned long) {
		  if (round == 0)
			  protect_page();
		  lose(rate), forget();
	  } },
	{ "break", [](unsigned long, unsigned long) { move_break(); } },
	{ "mapped", [](unsigned long, unsigned long) { map_and_write(MAP_PRIVATE); } },
	{ "huge",
	  [](unsigned long round, unsigned long) {
		  if (round % 16 == 0)
			  map_huge();
	  } },
	{ "shared", [](unsigned long, unsigned long) { map_and_write(MAP_SHARED); } },
	{ "shm", [](unsigned long, unsigned long) { attach_segment(); } },
	{ "memfd",
	  [](unsigned long, unsigned long) {
		  static int file = memfd_create("growth", 0);
		  write_file(file, MAP_SHARED);
	  } },
	{ "file",
	  [](unsigned long, unsigned long) {
		  static int file = open_file();
		  write_file(file, MAP_SHARED);
	  } },
	{ "copied",
	  [](unsigned long, unsigned long) {
		  static int file = open_file();
		  write_file(file, MAP_PRIVATE);
	  } },
	{ "idle", [](unsigned long, unsigned long) {} },
};

int main(int argc, char **argv)
{
	const program *program = programs;

	if (argc != 4)
		usage("LABEL MILLISECONDS SEED");
	while (strcmp(program->label, argv[1]))
		if (++program == std::end(programs))
			die("no label '%s'", argv[1]);
	length = count(argv[2]);
	seed = count(argv[3]);
	if (!mallopt(M_ARENA_MAX, 64))
		die("cannot have as many arenas");
	rate = between(11, 60);
	size = between(4001, 20011);
	begin_at = between(length / 8, length / 4);

	/* Blocks of a program that has run for a while. */
	had = between(2003, 8009);
	fill(had);
	replace(3001);
	blocks = 0;
	ready();
	unsigned long start = milliseconds();
	for (unsigned long round = 0; !is_enough(); round++)
		program->work(round, milliseconds() - start);
	unsigned long took = milliseconds() - start;
	wait_for_line();
	fact("blocks", "%lu", blocks);
	fact("milliseconds", "%lu", took);
	done();
	return 0;
}
