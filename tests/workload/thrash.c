// SPDX-License-Identifier: BSD-2-Clause
/*
 * Reclaim: writes PAGES anonymous pages, ROUNDS times over. In a memory cgroup
 * whose limit is below that, each round swaps out what the last one brought in.
 * How many faults there are is up to the kernel: tests can only ask for "at
 * least".
 *
 * facts: pages, rounds, minor, major, sum_ok
 */
#include "workload.h"

int main(int argc, char **argv)
{
	struct faults before, after;
	unsigned long pages, rounds, sum;
	char *at;

	if (argc != 3)
		usage("PAGES ROUNDS");
	pages = count(argv[1]);
	rounds = count(argv[2]);
	at = map_pages(pages);
	before = faults_now();
	ready();
	for (unsigned long i = 0; i < rounds; i++)
		write_pages(at, pages, PAGE);
	after = faults_now();
	sum = rounds ? read_pages(at, pages, PAGE) : sum_written(pages);
	fact("pages", "%lu", pages);
	fact("rounds", "%lu", rounds);
	fact_faults(before, after);
	fact("sum_ok", "%d", sum == sum_written(pages));
	done();
	return 0;
}
