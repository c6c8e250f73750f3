// SPDX-License-Identifier: BSD-2-Clause
/*
 * remap TIMES: as an unprivileged user, makes a page executable and writable in
 * turn, TIMES times, as JIT compilers do whose pages are never both (W^X), and calls
 * brk(2) after each change.
 *
 * facts: brk (calls)
 */
#include "hostile.h"

int main(int argc, char **argv)
{
	if (argc != 2)
		usage("TIMES");
	unsigned long times = count(argv[1]);

	drop_root();
	void *page = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (page == MAP_FAILED)
		die("cannot map memory for code: %s", strerror(errno));
	ready();
	for (unsigned long i = 0; i < times; i++) {
		if (mprotect(page, PAGE, PROT_READ | PROT_EXEC) ||
		    mprotect(page, PAGE, PROT_READ | PROT_WRITE))
			die("cannot make the page executable: %s", strerror(errno));
		syscall(SYS_brk, 0);
	}
	fact("brk", "%lu", times);
	done();
	return 0;
}
