/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Blocks that are lost or kept by functions of known names.
 *
 * Before "ready": 7 blocks of 900 bytes are lost, and 11 of 1000 kept, both by early().
 * After the line that follows: 101 blocks of 500 bytes are lost by forget(). A list of 19 blocks
 * of 200 bytes is lost by lose_list(): one block is lost itself, and 18 are lost with it. 5 objects
 * of class Session are lost by open_session(), each with a text of 40 bytes that only the object
 * refers to. 53 blocks of 300 bytes are kept in an array by remember(). One block of 700 bytes is
 * kept only by a pointer to its middle by point_into(). Then "done".
 *
 * An argument says how the program ends after that: by a signal of that number; "threads" while
 * three of its threads wait, each with a block of 600 bytes that only its stack (or, in the last
 * thread, only a register) refers to, and a fourth one has ended; "exec" by another run of itself;
 * "fork" after a child has exited that has lost 3 blocks of 1100 bytes. A second argument is the
 * exit status.
 */
#include "wipe.h"
#include <pthread.h>
#include <signal.h>

namespace
{

class Session
{
      public:
	virtual ~Session()
	{
	}
	char *text;
	unsigned long id;
};

struct node {
	node *next;
};

void *volatile early_kept[11];
void *volatile kept[53];
char *volatile middle;
Session *volatile opened;
pthread_barrier_t started;

STEP void early()
{
	for (int i = 0; i < 7; i++)
		*(volatile char *)calloc(1, 900) = 1;
	for (int i = 0; i < 11; i++)
		early_kept[i] = calloc(1, 1000);
}

STEP void forget()
{
	for (int i = 0; i < 101; i++)
		*(volatile char *)calloc(1, 500) = 1;
}

STEP void lose_list()
{
	node *head = nullptr;

	for (int i = 0; i < 19; i++) {
		node *one = (node *)calloc(1, 200);

		one->next = head;
		head = one;
		asm volatile("" ::"r"(head) : "memory");
	}
}

STEP void open_session(unsigned long id)
{
	opened = new Session;
	opened->id = id;
	opened->text = (char *)calloc(1, 40);
}

STEP void remember()
{
	for (int i = 0; i < 53; i++)
		kept[i] = calloc(1, 300);
}

STEP void point_into()
{
	middle = (char *)calloc(1, 700) + 350;
}

STEP void work()
{
	forget();
	lose_list();
	for (unsigned long i = 0; i < 5; i++)
		open_session(i);
	opened = nullptr;
	remember();
	point_into();
	wipe();
}

void *end(void *)
{
	return nullptr;
}

void *hold_in_stack(void *)
{
	void *volatile own = calloc(1, 600);

	asm volatile("" ::"r"(&own) : "memory");
	pthread_barrier_wait(&started);
	for (;;)
		pause();
}

void *hold_in_register(void *)
{
	pthread_barrier_wait(&started);
	void *own = calloc(1, 600);
	hold_in_one_register(own);
	return nullptr;
}

STEP void start_threads()
{
	pthread_t thread;

	pthread_barrier_init(&started, nullptr, 4);
	pthread_create(&thread, nullptr, end, nullptr);
	pthread_join(thread, nullptr);
	pthread_create(&thread, nullptr, hold_in_stack, nullptr);
	pthread_create(&thread, nullptr, hold_in_stack, nullptr);
	pthread_create(&thread, nullptr, hold_in_register, nullptr);
	pthread_barrier_wait(&started);
	usleep(100000);
	wipe();
}

STEP void fork_child()
{
	pid_t child = fork();

	if (!child) {
		for (int i = 0; i < 3; i++)
			*(volatile char *)calloc(1, 1100) = 1;
		_exit(0);
	}
	if (waitpid(child, nullptr, 0) != child)
		die("waitpid: %s", strerror(errno));
}

} // namespace

int main(int argc, char **argv)
{
	const char *how = argc > 1 ? argv[1] : "";

	early();
	wipe();
	ready();
	work();
	if (!strcmp(how, "threads"))
		start_threads();
	if (!strcmp(how, "fork"))
		fork_child();
	done();
	if (!strcmp(how, "exec"))
		execl("/proc/self/exe", "forget", "", argv[2], nullptr);
	if (how[0] >= '1' && how[0] <= '9')
		raise(atoi(how));
	return argc > 2 ? (int)count(argv[2]) : 0;
}
