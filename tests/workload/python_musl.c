/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * python-musl COUNT [nowhere]: leaks COUNT blocks of 113 bytes from each of two threads, in
 * Python functions named of_main and of_thread. The program has the data of CPython 3.12 by which
 * its stacks are walked, and nothing else: Debian has no Python on musl. With "nowhere", the
 * threads do not keep their states.
 */
#include "workload.h"
#include <pthread.h>

#define WORDS(bytes) ((bytes) / 8)

/* Python string (str) of ASCII characters. */
struct text {
	uint64_t head[2], length, hash, state;
	char ascii[24];
};
#define COMPACT_ASCII 100

struct frame {
	void *code;
	struct frame *previous;
	uint64_t other[5];
	void *instruction;
	char more[6], owner;
};
#define OWNED_BY_LOOP 3

struct thread {
	uint64_t state[WORDS(320)], code[WORDS(256)];
	struct text name;
	struct frame function;
	struct frame *current;
};

const uint64_t Py_Version = 0x030c00f0;
uint64_t PyCode_Type[WORDS(416)], _PyRuntime[WORDS(2048)];
static uint64_t interpreter[WORDS(128)];
static struct text file = { .length = 7, .state = COMPACT_ASCII, .ascii = "shop.py" };
static pthread_barrier_t barrier;
static pthread_key_t key;
static unsigned long blocks;
static bool nowhere;

static void code_dealloc(void *code)
{
	__asm__ volatile("" ::"r"(code));
}

/* Stands for a call of the interpreter's loop. */
STEP static void loop(struct thread *thread)
{
	struct frame entry = { .owner = OWNED_BY_LOOP };

	thread->function.previous = &entry;
	thread->current = &thread->function;
	for (unsigned long i = 0; i < blocks; i++)
		*(volatile char *)malloc(113) = 1;
	thread->current = NULL;
}

static void begin(struct thread *thread, const char *name)
{
	thread->name.length = strlen(name);
	thread->name.state = COMPACT_ASCII;
	strcpy(thread->name.ascii, name);
	thread->code[WORDS(8)] = (uint64_t)PyCode_Type;
	thread->code[WORDS(112)] = (uint64_t)&file;
	thread->code[WORDS(128)] = (uint64_t)&thread->name;
	thread->function.code = thread->code;
	thread->function.instruction = &thread->code[WORDS(192 + 16)];
	thread->state[WORDS(56)] = (uint64_t)&thread->current;
	thread->state[WORDS(136)] = (uint64_t)pthread_self();
	if (!nowhere)
		pthread_setspecific(key, thread->state);
}

static void *other_thread(void *thread)
{
	begin(thread, "of_thread");
	pthread_barrier_wait(&barrier);
	pthread_barrier_wait(&barrier);
	loop(thread);
	pthread_barrier_wait(&barrier);
	return NULL;
}

int main(int argc, char **argv)
{
	static struct thread first, second;
	pthread_t thread;

	if (argc != 2 && argc != 3)
		usage("COUNT [nowhere]");
	blocks = count(argv[1]);
	nowhere = argc == 3;
	PyCode_Type[WORDS(48)] = (uint64_t)code_dealloc;
	pthread_key_create(&key, NULL);
	_PyRuntime[WORDS(40)] = (uint64_t)interpreter;
	_PyRuntime[WORDS(1544)] = 1 | (uint64_t)key << 32;
	interpreter[WORDS(72)] = (uint64_t)first.state;
	first.state[WORDS(8)] = (uint64_t)second.state;
	begin(&first, "of_main");
	pthread_barrier_init(&barrier, NULL, 2);
	if (pthread_create(&thread, NULL, other_thread, &second))
		die("cannot start a thread");
	pthread_barrier_wait(&barrier);
	ready();
	pthread_barrier_wait(&barrier);
	loop(&first);
	pthread_barrier_wait(&barrier);
	done();
	return 0;
}
