// SPDX-License-Identifier: BSD-2-Clause
/*
 * brk(2): GROW calls that each grow the heap by BYTES (default: one page), then
 * SHRINK calls that each shrink it by as much, then QUERY calls that ask for its
 * end; the three by functions of their own, for the stacks. Nothing else calls
 * brk between "ready" and "done".
 *
 * facts: old, new (end of the heap before and after), peak, bytes, grow, shrink,
 *        query, brk (calls in all)
 */
#include "workload.h"

/*
 * The system call in the caller's own code: libc's function has no frame
 * pointer, and would hide its caller from a stack walk by frame pointers.
 */
static inline __attribute__((always_inline)) unsigned long call_brk(unsigned long to)
{
#ifdef __x86_64__
	unsigned long end;

	asm volatile("syscall" : "=a"(end) : "0"(SYS_brk), "D"(to) : "rcx", "r11", "memory");
	return end;
#else
	return syscall(SYS_brk, to);
#endif
}

STEP static unsigned long grow_heap(unsigned long end, unsigned long bytes)
{
	unsigned long now = call_brk(end + bytes);

	if (now != end + bytes)
		die("brk did not grow the heap; see ulimit -d and free memory");
	return now;
}

STEP static unsigned long shrink_heap(unsigned long end, unsigned long bytes)
{
	unsigned long now = call_brk(end - bytes);

	if (now != end - bytes)
		die("brk did not shrink the heap");
	return now;
}

STEP static unsigned long ask_heap(unsigned long end)
{
	unsigned long now = call_brk(0);

	if (now != end)
		die("brk tells another end than the one that it set");
	return now;
}

int main(int argc, char **argv)
{
	unsigned long grow, shrink, query, bytes, old, end, peak;

	if (argc < 2 || argc > 5)
		usage("GROW [SHRINK [QUERY [BYTES]]]");
	grow = count(argv[1]);
	shrink = argc > 2 ? count(argv[2]) : 0;
	query = argc > 3 ? count(argv[3]) : 0;
	bytes = argc > 4 ? count(argv[4]) : PAGE;
	if (shrink > grow)
		die("cannot shrink more often than grow");
	old = end = call_brk(0);
	ready();
	for (unsigned long i = 0; i < grow; i++)
		end = grow_heap(end, bytes);
	peak = end;
	for (unsigned long i = 0; i < shrink; i++)
		end = shrink_heap(end, bytes);
	for (unsigned long i = 0; i < query; i++)
		end = ask_heap(end);
	fact("old", "0x%lx", old);
	fact("new", "0x%lx", end);
	fact("peak", "0x%lx", peak);
	fact("bytes", "%lu", bytes);
	fact("grow", "%lu", grow);
	fact("shrink", "%lu", shrink);
	fact("query", "%lu", query);
	fact("brk", "%lu", grow + shrink + query);
	done();
	return 0;
}
