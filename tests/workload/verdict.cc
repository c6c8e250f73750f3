/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Blocks of known sizes. Blocks of each size are lost or held in one way. All exist before "ready".
 *
 * lost: 11 of 1000 bytes; a list of 19 of 2008 bytes, and a ring of 13 of 2104; 23 of 3200 in
 * frames that have returned; 2 of 6704 by a thread that has ended. held: 997 of 4008 by a vector
 * that a global holds; one each of 6000 by a mapped file, 6104 by shared memory, 6200 by
 * thread-local storage, 6304 by another thread's stack, 6408 only by r12 of a thread in pause(2),
 * and 7000 only by a pointer to its middle; 7104 by a packed structure, 7200 by a pointer with a
 * tag above its 47 bits, 7304 by the data that epoll has, and 7400 by the data of a timer. One of
 * 5000 is held only by a hidden pointer, so that it looks lost, too.
 *
 * With an argument, one of 5600 in addition, by a page that the program itself may not read.
 */
#include "wipe.h"
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <vector>

namespace
{

struct node {
	node *next;
};

struct __attribute__((packed)) record {
	char kind;
	void *block;
};

std::vector<void *> *cache;
volatile record packed;
volatile unsigned long tagged;
volatile unsigned long hidden;
char *volatile middle;
void **file;
void **shared_memory;
thread_local void *volatile own;
pthread_barrier_t started;

STEP void *block(unsigned long bytes)
{
	return calloc(1, bytes);
}

STEP void lose_blocks()
{
	for (int i = 0; i < 11; i++)
		*(volatile char *)block(1000) = 1;
}

STEP node *list(unsigned long count, unsigned long bytes, node **last)
{
	node *head = nullptr;

	for (unsigned long i = 0; i < count; i++) {
		node *one = (node *)block(bytes);

		if (!head)
			*last = one;
		one->next = head;
		head = one;
	}
	return head;
}

STEP void lose_lists()
{
	node *last;

	list(19, 2008, &last);
	node *head = list(13, 2104, &last);
	last->next = head;
}

STEP void lose_in_frames(int depth)
{
	void *volatile frame[32];

	for (int i = 0; i < 32; i++)
		frame[i] = depth ? nullptr : i < 23 ? block(3200) : nullptr;
	asm volatile("" ::"r"(&frame[0]) : "memory");
	if (depth)
		lose_in_frames(depth - 1);
	asm volatile("" ::"r"(&frame[0]) : "memory");
}

STEP void hold()
{
	cache = new std::vector<void *>;
	cache->reserve(2000);
	for (int i = 0; i < 997; i++)
		cache->push_back(block(4008));
	hidden = (unsigned long)block(5000) ^ 0x5a5a5a5a5a5a5a5aUL;
	middle = (char *)block(7000) + 500;
	packed.block = block(7104);
	tagged = (unsigned long)block(7200) | 0xfffbUL << 48;
	int fd = fileno(tmpfile());
	if (fd < 0 || ftruncate(fd, PAGE))
		die("no temporary file: %s", strerror(errno));
	file = (void **)mmap(nullptr, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	shared_memory =
	    (void **)mmap(nullptr, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	file[5] = block(6000);
	shared_memory[7] = block(6104);
}

STEP void hold_in_kernel()
{
	struct epoll_event event = {};
	struct sigevent expiry = {};
	timer_t timer;
	int epoll = epoll_create1(0);

	event.data.ptr = block(7304);
	if (epoll_ctl(epoll, EPOLL_CTL_ADD, eventfd(0, 0), &event))
		die("no epoll: %s", strerror(errno));
	expiry.sigev_notify = SIGEV_NONE;
	expiry.sigev_value.sival_ptr = block(7400);
	if (timer_create(CLOCK_MONOTONIC, &expiry, &timer))
		die("no timer: %s", strerror(errno));
}

STEP void hold_in_protected_page()
{
	void **page = (void **)mmap(nullptr, PAGE, PROT_READ | PROT_WRITE,
				    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	page[3] = block(5600);
	if (mprotect(page, PAGE, PROT_NONE))
		die("mprotect: %s", strerror(errno));
}

void *end(void *)
{
	void *volatile kept = block(6704);

	asm volatile("" ::"r"(&kept) : "memory");
	kept = block(6704);
	return nullptr;
}

void *hold_own(void *)
{
	own = block(6200);
	wipe();
	pthread_barrier_wait(&started);
	for (;;)
		pause();
}

void *hold_in_stack(void *)
{
	void *volatile kept = block(6304);

	wipe();
	asm volatile("" ::"r"(&kept) : "memory");
	pthread_barrier_wait(&started);
	for (;;)
		pause();
}

void *hold_in_register(void *)
{
	wipe();
	/* The address is in no frame: the block is made after the last call but pause(2). */
	pthread_barrier_wait(&started);
	void *kept = block(6408);
	hold_in_one_register(kept);
	return nullptr;
}

} // namespace

int main(int argc, char **)
{
	pthread_t ended, threads[3];

	pthread_barrier_init(&started, nullptr, 4);
	lose_blocks();
	lose_lists();
	lose_in_frames(30);
	hold();
	hold_in_kernel();
	if (argc > 1)
		hold_in_protected_page();
	pthread_create(&ended, nullptr, end, nullptr);
	pthread_join(ended, nullptr);
	pthread_create(&threads[0], nullptr, hold_own, nullptr);
	pthread_create(&threads[1], nullptr, hold_in_stack, nullptr);
	pthread_create(&threads[2], nullptr, hold_in_register, nullptr);
	pthread_barrier_wait(&started);
	usleep(300000);
	wipe();
	ready();
	done();
	return 0;
}
