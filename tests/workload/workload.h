/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * The protocol of the workloads, and helpers that several of them need.
 *
 * A test starts a program with counts of its choice (prime ones, so that no other
 * sum equals them by accident) and talks to it over pipes:
 *
 *	program:  ready PID          set up; a tool can be attached now
 *	test:     any line
 *	program:  done KEY=VALUE...  the work is done; these are the facts
 *	test:     any line, or closes the pipe
 *	program:  exits with 0
 *
 * End of file counts as a line, so that a program run by hand with </dev/null
 * does not stop. If something cannot be set up (no swap, no huge pages), the program
 * says so on stderr, with the remedy, before "ready"; its status is then 1.
 *
 * Between "ready" and "done" a program makes only the system calls and page
 * faults that it is for, and two of the protocol's own (write and read). So there
 * is no stdio and no malloc here, and settle() below.
 */
#ifndef WORKLOAD_H
#define WORKLOAD_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE	  4096UL
#define HUGE_PAGE (2UL << 20)

/* Marks a function that is not inlined, so that every stack through it has its frame. */
#define STEP __attribute__((noinline, unused))

/* Hides a pointer's use from the optimiser, so that frames are kept and no call is a tail call. */
#define KEEP(pointer) __asm__ volatile("" : : "r"(pointer) : "memory")

/* Prints the reason on stderr, and ends the program. */
__attribute__((noreturn, format(printf, 1, 2))) static inline void die(const char *format, ...)
{
	char text[512];
	va_list args;

	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	dprintf(2, "%s: %s\n", program_invocation_short_name, text);
	_exit(1);
}

/* Prints the usage line and ends the program: its arguments are wrong. */
__attribute__((noreturn)) static inline void usage(const char *arguments)
{
	dprintf(2, "usage: %s %s\n", program_invocation_short_name, arguments);
	_exit(2);
}

/* Parses a count from the command line. */
static inline unsigned long count(const char *text)
{
	char *end;
	unsigned long value;

	errno = 0;
	value = strtoul(text, &end, 0);
	if (errno || end == text || *end || *text == '-')
		die("'%s' is no count", text);
	return value;
}

static inline void say(const char *text, size_t length)
{
	while (length > 0) {
		ssize_t written = write(1, text, length);

		if (written < 0)
			die("cannot write to stdout: %s", strerror(errno));
		text += written;
		length -= written;
	}
}

static inline void wait_for_line(void)
{
	char byte;

	while (read(0, &byte, 1) == 1 && byte != '\n')
		;
}

/*
 * Makes page faults from here on exact: all present mappings are brought in and
 * locked, so that only memory mapped later faults. The thread stays on one CPU,
 * because pages that wait in the lists of another CPU cannot be reclaimed at once.
 */
static inline void settle(void)
{
	cpu_set_t cpu;

	CPU_ZERO(&cpu);
	CPU_SET(sched_getcpu(), &cpu);
	if (sched_setaffinity(0, sizeof(cpu), &cpu))
		die("cannot stay on one CPU: %s", strerror(errno));
	if (mlockall(MCL_CURRENT))
		die("cannot lock the program's memory: %s; run as root or raise ulimit -l",
		    strerror(errno));
}

static inline void ready(void)
{
	char text[32];
	int length = snprintf(text, sizeof(text), "ready %d\n", getpid());

	say(text, length);
	wait_for_line();
}

/* Line that done() will print. */
static char facts[512 << 10] = "done";
static size_t facts_length = 4;

/* Adds one fact, "key=value", or a piece of one. */
__attribute__((format(printf, 1, 2))) static inline void add(const char *format, ...)
{
	va_list args;
	int length;

	va_start(args, format);
	length = vsnprintf(facts + facts_length, sizeof(facts) - facts_length, format, args);
	va_end(args);
	if (length < 0 || facts_length + length >= sizeof(facts))
		die("the facts are too long; use smaller counts");
	facts_length += length;
}

#define fact(key, format, ...) add(" " key "=" format, __VA_ARGS__)

/* Prints the facts and waits until the program may go on. Clean-up may follow, or more work and
 * its facts. */
static inline void done(void)
{
	add("\n");
	say(facts, facts_length);
	facts_length = strlen("done");
	wait_for_line();
}

/* Page faults of this process and its threads so far. */
struct faults {
	long minor;
	long major;
};

static inline struct faults faults_now(void)
{
	struct rusage usage;

	getrusage(RUSAGE_SELF, &usage);
	return (struct faults){ usage.ru_minflt, usage.ru_majflt };
}

static inline void fact_faults(struct faults before, struct faults after)
{
	fact("minor", "%ld", after.minor - before.minor);
	fact("major", "%ld", after.major - before.major);
}

/*
 * System call with its arguments and its result, for tools that print a line for
 * each call. As a fact: key=ARG:ARG:..:RESULT,..., arguments in hex (of an int, its 32
 * bits), the result in hex or as -ENAME.
 */
struct call {
	int arguments;
	unsigned long argument[6];
	long result;
	int error;
};

struct calls {
	unsigned long made;
	struct call call[4096];
};

static inline void calls_add(struct calls *calls, long result, int arguments, ...)
{
	int error = errno;
	struct call *call;
	va_list args;

	if (calls->made == sizeof(calls->call) / sizeof(*calls->call))
		die("more than %lu calls to list; use a smaller count", calls->made);
	call = &calls->call[calls->made++];
	call->arguments = arguments;
	call->result = result;
	call->error = error;
	va_start(args, arguments);
	for (int i = 0; i < arguments; i++)
		call->argument[i] = va_arg(args, unsigned long);
	va_end(args);
}

#ifdef __GLIBC__
static inline void fact_calls(const char *key, const struct calls *calls)
{
	add(" %s=", key);
	for (unsigned long i = 0; i < calls->made; i++) {
		const struct call *call = &calls->call[i];

		add("%s", i ? "," : "");
		for (int j = 0; j < call->arguments; j++)
			add("0x%lx:", call->argument[j]);
		if (call->result == -1)
			add("-%s", strerrorname_np(call->error));
		else
			add("0x%lx", (unsigned long)call->result);
	}
}
#endif

/*
 * Limits a mapping to small pages: otherwise one fault may bring in 512 of them, and
 * khugepaged (also for a file, on 7.2) may bring in all while the program waits.
 */
static inline void refuse_huge_pages(char *at, unsigned long length)
{
	/* EINVAL means a kernel without huge pages. */
	if (madvise(at, length, MADV_NOHUGEPAGE) && errno != EINVAL)
		die("cannot refuse huge pages: %s", strerror(errno));
}

/*
 * Maps anonymous memory whose pages come in one at a time. Must be called after
 * settle(), which would bring them in.
 */
static inline char *map_pages(unsigned long pages)
{
	char *at = (char *)mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE,
				MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (at == MAP_FAILED)
		die("cannot map %lu pages: %s", pages, strerror(errno));
	refuse_huge_pages(at, pages * PAGE);
	return at;
}

/* Writes to each page once; no two pages get the same contents. */
STEP static void write_pages(char *at, unsigned long pages, unsigned long size)
{
	for (unsigned long i = 0; i < pages; i++)
		*(volatile unsigned long *)(at + i * size) = i + 1;
}

/* Reads each page once, and returns the sum of the first words. */
STEP static unsigned long read_pages(const char *at, unsigned long pages, unsigned long size)
{
	unsigned long sum = 0;

	for (unsigned long i = 0; i < pages; i++)
		sum += *(const volatile unsigned long *)(at + i * size);
	return sum;
}

/* Returns what read_pages() returns after write_pages(). */
static inline unsigned long sum_written(unsigned long pages)
{
	return pages * (pages + 1) / 2;
}

/* Fills a file with `pages` pages, of which no two have the same contents. */
static inline void fill_file(int fd, const char *path, unsigned long pages)
{
	static unsigned long page[PAGE / sizeof(long)];

	for (unsigned long i = 0; i < pages; i++) {
		page[0] = i + 1;
		if (write(fd, page, PAGE) != (ssize_t)PAGE) {
			int error = errno;

			unlink(path);
			die("cannot write to %s: %s", path, strerror(error));
		}
	}
}

/* Returns how many pages of a mapping are in memory. */
static inline unsigned long cached(char *at, unsigned long pages)
{
	unsigned long found = 0;
	unsigned char in[512];

	for (unsigned long i = 0; i < pages; i += sizeof(in)) {
		unsigned long n = pages - i < sizeof(in) ? pages - i : sizeof(in);

		if (mincore(at + i * PAGE, n * PAGE, in))
			die("mincore: %s", strerror(errno));
		for (unsigned long j = 0; j < n; j++)
			found += in[j] & 1;
	}
	return found;
}

/* Drops a file, which is mapped as a whole, from the page cache. */
static inline void drop_from_cache(int fd, char *at, unsigned long pages, const char *path)
{
	unsigned long left = 1;

	/* A page that the kernel is still busy with stays in the cache, so the request is
	 * repeated. */
	for (int tries = 0; left && tries < 50; tries++) {
		if (fsync(fd) || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED))
			die("cannot drop %s from the cache: %s", path, strerror(errno));
		left = cached(at, pages);
		if (left)
			usleep(20000);
	}
	if (left) {
		unlink(path);
		die("%lu pages of %s stay in the cache; name a file on a disk", left, path);
	}
}

#endif
