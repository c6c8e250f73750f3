// SPDX-License-Identifier: BSD-2-Clause
/*
 * Faults on huge pages (of 2 MB, reserved in vm.nr_hugepages): writes to PAGES
 * private ones, one fault each. With COWS, a child then writes to COWS of
 * them, which copies them: one fault each, by the child. PAGES + COWS huge pages
 * must be free. With "beyond" for COWS, one more page is written to. It is not reserved
 * and, if there are only PAGES, not available: SIGBUS.
 *
 * facts: pages, cows, sigbus, addr, child (its pid; 0 without), child_faults (= cows),
 *        minor (of the parent: = pages without COWS; fork adds some)
 */
#include "workload.h"
#include <setjmp.h>
#include <signal.h>

static sigjmp_buf caught;

static void on_sigbus(int signal)
{
	siglongjmp(caught, signal);
}

/* Writes to a page of another mapping, for which no page is reserved. */
static bool write_beyond(char *at)
{
	signal(SIGBUS, on_sigbus);
	if (sigsetjmp(caught, 1))
		return true;
	*(volatile char *)at = 1;
	return false;
}

int main(int argc, char **argv)
{
	struct faults before, after;
	unsigned long pages, cows;
	long child_faults = 0;
	int status = 0;
	pid_t child = 0;
	bool beyond, sigbus = false;
	char *at, *more = NULL;

	if (argc < 2 || argc > 3)
		usage("PAGES [COWS|beyond]");
	pages = count(argv[1]);
	beyond = argc > 2 && !strcmp(argv[2], "beyond");
	cows = argc > 2 && !beyond ? count(argv[2]) : 0;
	if (cows > pages)
		die("cannot copy %lu of %lu pages; COWS is at most PAGES", cows, pages);
	settle();
	at = mmap(NULL, pages * HUGE_PAGE, PROT_READ | PROT_WRITE,
		  MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
	if (at == MAP_FAILED)
		die("cannot map %lu huge pages: %s; echo %lu >/proc/sys/vm/nr_hugepages", pages,
		    strerror(errno), pages + cows);
	if (beyond)
		more = mmap(NULL, HUGE_PAGE, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_NORESERVE, -1, 0);
	if (more == MAP_FAILED)
		die("cannot map a huge page that is not reserved: %s", strerror(errno));
	before = faults_now();
	ready();
	write_pages(at, pages, HUGE_PAGE);
	if (cows) {
		child = fork();
		if (child < 0)
			die("cannot fork: %s", strerror(errno));
		if (!child) {
			write_pages(at, cows, HUGE_PAGE);
			_exit(0);
		}
		if (waitpid(child, &status, 0) != child || status)
			die("the child could not copy; echo %lu >/proc/sys/vm/nr_hugepages",
			    pages + cows);
		child_faults = cows;
	}
	if (beyond)
		sigbus = write_beyond(more);
	after = faults_now();
	fact("sigbus", "%d", sigbus);
	fact("pages", "%lu", pages);
	fact("cows", "%lu", cows);
	fact("addr", "%p", at);
	fact("child", "%d", child);
	fact("child_faults", "%ld", child_faults);
	fact_faults(before, after);
	done();
	return 0;
}
