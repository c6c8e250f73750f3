// SPDX-License-Identifier: BSD-2-Clause
/*
 * Transparent huge pages: requests them by MADV_HUGEPAGE on REGIONS regions of
 * 2 MB, and writes to each page of these. One fault a region where the kernel
 * gives huge pages, 512 where it does not. With "dontneed", it then gives them
 * all back by MADV_DONTNEED and writes once more. With "odd", it reads one more region,
 * and writes to a mapping of half a region. With "first", it writes to the first page of
 * each region only. With "shared", it does the same to shared memory.
 *
 * facts: alloc, fallback, file_alloc (increases in /proc/vmstat, of all processes), regions,
 * addr, minor, major, huge_kb (= 2048 * regions; by smaps, in the end), madvise (the calls, see
 * workload.h)
 */
#include "workload.h"

static struct calls calls;

static void advise(char *at, unsigned long length, int advice)
{
	int result = madvise(at, length, advice);

	calls_add(&calls, result, 3, at, length, (unsigned long)advice);
	if (result)
		die("madvise: %s; does this kernel have transparent huge pages?", strerror(errno));
}

/* Reads a file of /proc as text. Text that does not fit is left out. */
static void read_all(const char *path, char *text, size_t bytes)
{
	size_t length = 0;
	ssize_t n;
	int fd = open(path, O_RDONLY);

	while (fd >= 0 && (n = read(fd, text + length, bytes - 1 - length)) > 0)
		length += n;
	close(fd);
	text[length] = 0;
}

/* Returns AnonHugePages of the mapping that begins at the address. */
static unsigned long huge_kb(const char *at)
{
	static char text[1 << 20];
	char want[32], *line;

	read_all("/proc/self/smaps", text, sizeof(text));
	snprintf(want, sizeof(want), "%lx-", (unsigned long)at);
	line = strstr(text, want);
	line = line ? strstr(line, "AnonHugePages:") : NULL;
	return line ? strtoul(line + strlen("AnonHugePages:"), NULL, 10) : 0;
}

/* Returns a counter of /proc/vmstat. */
static unsigned long vmstat(const char *name)
{
	static char text[64 << 10];
	char *line = text;

	read_all("/proc/vmstat", text, sizeof(text));
	while ((line = strstr(line, name)) && line[strlen(name)] != ' ')
		line++;
	return line ? strtoul(line + strlen(name), NULL, 10) : 0;
}

int main(int argc, char **argv)
{
	struct faults before, after;
	unsigned long regions, length, kb, alloc, fallback, file_alloc;
	bool dontneed, odd, first, shared;
	char *at;

	dontneed = argc == 3 && !strcmp(argv[2], "dontneed");
	odd = argc == 3 && !strcmp(argv[2], "odd");
	shared = argc == 3 && !strcmp(argv[2], "shared");
	first = shared || (argc == 3 && !strcmp(argv[2], "first"));
	if (argc < 2 || argc > 3 || (argc == 3 && !dontneed && !odd && !first))
		usage("REGIONS [dontneed|odd|first|shared]");
	regions = count(argv[1]);
	length = regions * HUGE_PAGE;
	settle();
	/* Maps four regions more than needed, and aligns the start to a huge page. */
	at = mmap(NULL, length + 4 * HUGE_PAGE, PROT_READ | PROT_WRITE,
		  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (at == MAP_FAILED)
		die("cannot map %lu regions: %s", regions, strerror(errno));
	at = (char *)(((unsigned long)at + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1));
	if (shared && mmap(at, length, PROT_READ | PROT_WRITE,
			   MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != at)
		die("cannot map shared memory: %s", strerror(errno));
	before = faults_now();
	ready();
	alloc = vmstat("thp_fault_alloc");
	fallback = vmstat("thp_fault_fallback");
	file_alloc = vmstat("thp_file_alloc");
	advise(at, length, MADV_HUGEPAGE);
	if (first)
		write_pages(at, regions, HUGE_PAGE);
	else
		write_pages(at, length / PAGE, PAGE);
	if (dontneed) {
		advise(at, length, MADV_DONTNEED);
		write_pages(at, length / PAGE, PAGE);
	}
	if (odd) {
		/* A hole on either side makes the half a mapping of its own. */
		char *half = at + length + 2 * HUGE_PAGE;

		munmap(at + length + HUGE_PAGE, HUGE_PAGE);
		munmap(half + HUGE_PAGE / 2, HUGE_PAGE / 2);
		advise(at, length + HUGE_PAGE, MADV_HUGEPAGE);
		advise(half, HUGE_PAGE / 2, MADV_HUGEPAGE);
		read_pages(at + length, HUGE_PAGE / PAGE, PAGE);
		write_pages(half, HUGE_PAGE / PAGE / 2, PAGE);
	}
	after = faults_now();
	alloc = vmstat("thp_fault_alloc") - alloc;
	fallback = vmstat("thp_fault_fallback") - fallback;
	file_alloc = vmstat("thp_file_alloc") - file_alloc;
	fact("alloc", "%lu", alloc);
	fact("file_alloc", "%lu", file_alloc);
	fact("fallback", "%lu", fallback);
	kb = huge_kb(at);
	fact("regions", "%lu", regions);
	fact("addr", "%p", at);
	fact_faults(before, after);
	fact("huge_kb", "%lu", kb);
	fact_calls("madvise", &calls);
	done();
	return 0;
}
