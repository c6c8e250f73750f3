/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Blocks whose only pointers are in a mapped file, or in shared memory, in pages that the program's
 *page table lacks.
 *
 *	elsewhere HOW BLOCKS FILE
 *
 * BLOCKS blocks of 1000 bytes are held so, and 7 of 3000 bytes are lost. HOW is fork (another
 *process has written the pointers to shared memory), dontneed (the program has, before
 *MADV_DONTNEED), readonly (the memory is protected from being written, too), packed (the pointers
 *are at odd addresses), file (a file is mapped instead, FILE), private (the same, for this program
 *alone, and it was written by pwrite(2)) or disk (the file's pages are not in the page cache
 *either). Facts: used=BLOCKS whose content was right, and resident=KILOBYTES of the mapping before
 *they were used.
 */
#include "workload.h"
#include "wipe.h"

#define LOST 7

static char *volatile blocks[4096];
static volatile char *table;
static unsigned long number, step = sizeof(char *);
static size_t length;

static STEP void fill(char *to)
{
	for (unsigned long i = 0; i < number; i++)
		memcpy(to + i * step + step - sizeof(char *), (char *)&blocks[i], sizeof(char *));
}

static STEP void allocate(void)
{
	for (unsigned long i = 0; i < number; i++)
		memset(blocks[i] = malloc(1000), 0x80 | (i & 0x3f), 1000);
	for (int i = 0; i < LOST; i++)
		memset(malloc(3000), 1, 3000);
}

static int open_file(const char *path)
{
	int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);

	if (file < 0 || ftruncate(file, length))
		die("cannot make %s: %s", path, strerror(errno));
	return file;
}

static STEP void hide(const char *how, const char *path)
{
	bool is_private = !strcmp(how, "private"), is_disk = !strcmp(how, "disk");
	int file = is_private || is_disk || !strcmp(how, "file") ? open_file(path) : -1;

	if (!strcmp(how, "packed"))
		step = 9;
	table =
	    mmap(NULL, length, PROT_READ | PROT_WRITE,
		 (is_private ? MAP_PRIVATE : MAP_SHARED) | (file < 0 ? MAP_ANONYMOUS : 0), file, 0);
	if (table == MAP_FAILED)
		die("cannot map: %s", strerror(errno));
	if (is_private) {
		if (pwrite(file, (char *)blocks, number * step, 0) < 0)
			die("cannot write: %s", strerror(errno));
	} else if (!strcmp(how, "fork")) {
		pid_t child = fork();

		if (!child) {
			fill((char *)table);
			_exit(0);
		}
		waitpid(child, NULL, 0);
	} else {
		fill((char *)table);
		if (is_disk && fsync(file))
			die("cannot sync: %s", strerror(errno));
		madvise((char *)table, length, MADV_DONTNEED);
		if (is_disk)
			posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
	}
	if (!strcmp(how, "readonly") && mprotect((char *)table, length, PROT_READ))
		die("cannot protect: %s", strerror(errno));
	memset((char *)blocks, 0, sizeof(blocks));
}

static unsigned long resident(void)
{
	FILE *smaps = fopen("/proc/self/smaps", "r");
	unsigned long start, end, kilobytes;
	char line[4096];
	bool ours = false;

	while (smaps && fgets(line, sizeof(line), smaps)) {
		if (sscanf(line, "%lx-%lx ", &start, &end) == 2)
			ours = start == (unsigned long)table;
		else if (ours && sscanf(line, "Rss: %lu kB", &kilobytes) == 1)
			return kilobytes;
	}
	return ~0UL;
}

static STEP unsigned long use(void)
{
	unsigned long right = 0;

	for (unsigned long i = 0; i < number; i++) {
		char *block;

		memcpy(&block, (char *)table + i * step + step - sizeof(block), sizeof(block));
		right += block[999] == (char)(0x80 | (i & 0x3f));
	}
	return right;
}

int main(int argc, char **argv)
{
	if (argc != 4)
		usage("HOW BLOCKS FILE");
	number = count(argv[2]);
	if (number > sizeof(blocks) / sizeof(*blocks))
		die("too many blocks");
	/* The last pages are a hole. */
	length = (number * 9 / PAGE + 3) * PAGE;
	allocate();
	hide(argv[1], argv[3]);
	wipe();
	ready();
	fact("resident", "%lu", resident());
	fact("used", "%lu", use());
	done();
	return 0;
}
