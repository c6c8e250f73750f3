/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Calls C as Go's runtime does: on a stack that is not the caller's and lies above it, through a
 * function without unwind information that leaves the frame pointer alone.
 *
 *	cgo COUNT SIZE   leaks COUNT blocks of SIZE bytes on the other stack
 */
#include "workload.h"

#include <pthread.h>

#define STACK_BYTES (256UL << 10)

/* By this section a file is known to be a Go program. */
__attribute__((section(".go.buildinfo"), used)) static char buildinfo[16] = "\xff Go buildinf:";

void call_on(void (*function)(void), void *stack) __asm__("runtime.asmcgocall.abi0");

__asm__(".text\n"
	".type runtime.asmcgocall.abi0,@function\n"
	"runtime.asmcgocall.abi0:\n"
	"	mov	%rsp,%rdx\n"
	"	lea	-16(%rsi),%rsp\n"
	"	mov	%rdx,(%rsp)\n"
	"	call	*%rdi\n"
	"	mov	(%rsp),%rsp\n"
	"	ret\n"
	".size runtime.asmcgocall.abi0,.-runtime.asmcgocall.abi0\n");

static unsigned long blocks, size;
static void *volatile kept;
static char *stack;

STEP static void leak_in_c(void)
{
	for (unsigned long i = 0; i < blocks; i++)
		kept = malloc(size);
}

STEP static void call_c(void)
{
	call_on(leak_in_c, stack + STACK_BYTES);
	KEEP(stack);
}

STEP static void handle_in_go(void)
{
	call_c();
	KEEP(stack);
}

static void *other(void *unused)
{
	(void)unused;
	ready();
	handle_in_go();
	done();
	return NULL;
}

int main(int argc, char **argv)
{
	pthread_t thread;

	if (argc != 3)
		usage("COUNT SIZE");
	blocks = count(argv[1]);
	size = count(argv[2]);
	/* The thread's stack will be mapped below. */
	stack = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (stack == MAP_FAILED || pthread_create(&thread, NULL, other, NULL))
		die("no thread");
	pthread_join(thread, NULL);
	return 0;
}
