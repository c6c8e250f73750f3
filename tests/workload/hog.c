// SPDX-License-Identifier: BSD-2-Clause
/*
 * Out of memory: writes to MB megabytes. If that is more than the cgroup's limit or
 * the machine has (swap included), the kernel kills the program, status 137 in a shell.
 * If it is less, the program only makes memory scarce (direct reclaim, kswapd).
 *
 * SCORE goes to oom_score_adj, so that no other process is the victim instead.
 * The mapping is not reserved, so vm.overcommit_memory can stay as it is.
 *
 * facts, if it survives: pages, minor, major
 */
#include "workload.h"

int main(int argc, char **argv)
{
	struct faults before, after;
	unsigned long pages;
	char *at;

	if (argc < 2 || argc > 3)
		usage("MB [SCORE]");
	pages = count(argv[1]) << (20 - 12);
	if (argc > 2) {
		int fd = open("/proc/self/oom_score_adj", O_WRONLY);

		if (fd < 0 || write(fd, argv[2], strlen(argv[2])) < 0)
			die("cannot set oom_score_adj to %s: %s", argv[2], strerror(errno));
		close(fd);
	}
	at = map_pages(pages);
	before = faults_now();
	ready();
	write_pages(at, pages, PAGE);
	after = faults_now();
	fact("pages", "%lu", pages);
	fact_faults(before, after);
	done();
	return 0;
}
