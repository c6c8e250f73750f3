/* SPDX-License-Identifier: BSD-2-Clause */
/* A 32-bit program that only holds (workload.h has the protocol), without a C library for it. */

static int call(int number, int a, const void *b, int c)
{
	int result;

	__asm__ volatile("int $0x80"
			 : "=a"(result)
			 : "a"(number), "b"(a), "c"(b), "d"(c)
			 : "memory");
	return result;
}

enum { SYS_EXIT = 1, SYS_READ = 3, SYS_WRITE = 4 };

void _start(void)
{
	char byte;

	call(SYS_WRITE, 1, "ready 1\n", 8);
	while (call(SYS_READ, 0, &byte, 1) == 1)
		;
	call(SYS_EXIT, 0, 0, 0);
}
