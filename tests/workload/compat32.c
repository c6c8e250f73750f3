/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * A 32-bit program, without a C library for it (workload.h has the protocol). Its
 * work is 23 calls of i386's mmap2, each a page longer than the one before. Then it maps
 * its own file: the second page by mmap2, and the first one by the old mmap. In the end,
 * mremap extends the mapping of the first call to five pages, and munmap unmaps that of
 * the second call.
 *
 * facts: calls (the results in hexadecimal, in their order)
 */

#define PAGE  4096
#define CALLS 23

enum {
	SYS_EXIT = 1,
	SYS_READ = 3,
	SYS_WRITE = 4,
	SYS_OPEN = 5,
	SYS_MMAP = 90,
	SYS_MUNMAP = 91,
	SYS_MREMAP = 163,
	SYS_MMAP2 = 192,
};

enum { READ = 1, READ_WRITE = 3, PRIVATE = 2, ANONYMOUS = 0x20, MAYMOVE = 1 };

static char facts[1024];
static int length;

/* i386's sixth argument is in ebp, which the compiler wants for itself. */
__attribute__((naked, regparm(1))) static int call(const int *registers __attribute__((unused)))
{
	__asm__("push %ebx; push %esi; push %edi; push %ebp\n\t"
		"mov (%eax), %edx; push %edx\n\t"
		"mov 4(%eax), %ebx; mov 8(%eax), %ecx; mov 12(%eax), %edx\n\t"
		"mov 16(%eax), %esi; mov 20(%eax), %edi; mov 24(%eax), %ebp\n\t"
		"pop %eax; int $0x80\n\t"
		"pop %ebp; pop %edi; pop %esi; pop %ebx; ret");
}

#define CALL(...) call((const int[7]){ __VA_ARGS__ })

static void add(char byte)
{
	facts[length++] = byte;
}

static void add_text(const char *text)
{
	while (*text)
		add(*text++);
}

static unsigned int add_result(unsigned int result)
{
	add_text(length > 11 ? ",0x" : "0x");
	for (int shift = 28; shift >= 0; shift -= 4)
		if (result >> shift)
			add("0123456789abcdef"[result >> shift & 15]);
	if (!result)
		add('0');
	return result;
}

static void wait_for_line(void)
{
	char byte;

	while (CALL(SYS_READ, 0, (int)&byte, 1) == 1 && byte != '\n')
		;
}

void _start(void)
{
	unsigned int first = 0, second = 0;
	int file = CALL(SYS_OPEN, (int)"/proc/self/exe", 0);
	int old[6] = { 0, PAGE, READ, PRIVATE, file, 0 };

	CALL(SYS_WRITE, 1, (int)"ready 1\n", 8);
	wait_for_line();
	add_text("done calls=");
	for (int i = 0; i < CALLS; i++) {
		unsigned int at = add_result(
		    CALL(SYS_MMAP2, 0, (i + 1) * PAGE, READ_WRITE, PRIVATE | ANONYMOUS, -1, 0));

		if (i == 0)
			first = at;
		if (i == 1)
			second = at;
	}
	add_result(CALL(SYS_MMAP2, 0, PAGE, READ, PRIVATE, file, 1));
	add_result(CALL(SYS_MMAP, (int)old));
	add_result(CALL(SYS_MREMAP, first, PAGE, 5 * PAGE, MAYMOVE));
	add_result(CALL(SYS_MUNMAP, second, 2 * PAGE));
	add('\n');
	CALL(SYS_WRITE, 1, (int)facts, length);
	wait_for_line();
	CALL(SYS_EXIT, 0);
}
