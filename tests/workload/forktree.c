// SPDX-License-Identifier: BSD-2-Clause
/*
 * A tree of processes: WIDTH children each, DEPTH levels below the first one. Each
 * process but the first writes to PAGES pages that its parent wrote to before, so
 * that they are copied, and lives until all its children have ended.
 *
 * facts: forks (= WIDTH + WIDTH^2 + ... + WIDTH^DEPTH), pages, addr, pids (of all
 *        processes but the first, in the order in which they started)
 */
#include "workload.h"

#define MOST 4096

/* State that the whole tree shares. */
static struct {
	unsigned int forks;
	pid_t pid[MOST];
} * tree;

static unsigned long width, pages;
static char *at;

STEP static void grow(unsigned long depth)
{
	int status;

	for (unsigned long i = 0; depth && i < width; i++) {
		pid_t child = fork();

		if (child < 0)
			die("cannot fork: %s; see ulimit -u", strerror(errno));
		if (!child) {
			tree->pid[__atomic_fetch_add(&tree->forks, 1, __ATOMIC_SEQ_CST)] = getpid();
			write_pages(at, pages, PAGE);
			grow(depth - 1);
			_exit(0);
		}
	}
	while (wait(&status) > 0)
		if (status)
			die("a child failed with status 0x%x", status);
}

int main(int argc, char **argv)
{
	unsigned long depth, all = 0, level = 1;

	if (argc < 3 || argc > 4)
		usage("WIDTH DEPTH [PAGES]");
	width = count(argv[1]);
	depth = count(argv[2]);
	pages = argc > 3 ? count(argv[3]) : 1;
	for (unsigned long i = 0; i < depth && all <= MOST; i++)
		all += level *= width;
	if (all > MOST)
		die("a tree of more than %d processes; use a smaller one", MOST);
	tree = mmap(NULL, sizeof(*tree), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (tree == MAP_FAILED)
		die("cannot map the tree: %s", strerror(errno));
	settle();
	at = map_pages(pages);
	write_pages(at, pages, PAGE);
	ready();
	grow(depth);
	fact("forks", "%u", tree->forks);
	fact("pages", "%lu", pages);
	fact("addr", "%p", at);
	add(" pids=");
	for (unsigned int i = 0; i < tree->forks; i++)
		add("%s%d", i ? "," : "", tree->pid[i]);
	done();
	return 0;
}
