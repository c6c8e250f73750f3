// SPDX-License-Identifier: BSD-2-Clause
/*
 * Adds up the words of a file's records, in the worked example of the README. The
 * program has two faults. It frees all memory before it exits, so that neither fault
 * is a leak to a tool that looks then:
 *
 * - slurp() has a buffer as large as the input, of which one record at a time is used
 * - summarise() has a chunk for each record, of which only the sum is used, and keeps
 *   all chunks until the end
 *
 * Built with -DFIXED it reads a record at a time, and frees each chunk.
 *
 * facts: records, words
 */
#include "workload.h"

#include <sys/prctl.h>

#define RECORD 4096
#define INLINE static inline __attribute__((always_inline))

struct summary {
	struct summary *next;
	unsigned long words;
	char text[2039 - 2 * sizeof(long)];
} __attribute__((packed));

static struct summary *summaries;

INLINE struct summary *new_summary(void)
{
	struct summary *summary = malloc(sizeof(*summary));

	if (!summary)
		die("no memory");
	return summary;
}

STEP static unsigned long summarise(const char *record)
{
	struct summary *summary = new_summary();
	unsigned long words = 0;
	bool within = false;
	int i;

	for (i = 0; i < RECORD; i++) {
		bool letter = record[i] != ' ';

		words += letter && !within;
		within = letter;
	}
	memcpy(summary->text, record, sizeof(summary->text));
	summary->words = words;
	summary->next = summaries;
	summaries = summary;
	return words;
}

/* Frees all summaries. */
static void forget(void)
{
	while (summaries) {
		struct summary *next = summaries->next;

		free(summaries);
		summaries = next;
	}
}

static void read_whole(int file, char *buffer, size_t length)
{
	while (length > 0) {
		ssize_t got = read(file, buffer, length);

		if (got <= 0)
			die("cannot read the input: %s", got ? strerror(errno) : "too short");
		buffer += got;
		length -= got;
	}
}

#ifndef FIXED
STEP static char *slurp(int file, size_t length)
{
	char *buffer = malloc(length);

	if (!buffer)
		die("no memory");
	read_whole(file, buffer, length);
	return buffer;
}
#endif

int main(int argc, char **argv)
{
	unsigned long words = 0, records, i;
	struct stat input;
	char *buffer;
	int file;

	if (argc != 2)
		usage("INPUT");
	/* Forbids huge pages, so that each page has a fault, whatever this machine has set. */
	prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
	file = open(argv[1], O_RDONLY | O_CLOEXEC);
	if (file < 0 || fstat(file, &input))
		die("cannot open %s: %s", argv[1], strerror(errno));
	records = input.st_size / RECORD;
	ready();
#ifdef FIXED
	static char record[RECORD];

	buffer = NULL;
	for (i = 0; i < records; i++) {
		read_whole(file, record, RECORD);
		words += summarise(record);
		forget();
	}
#else
	buffer = slurp(file, records * RECORD);
	for (i = 0; i < records; i++)
		words += summarise(buffer + i * RECORD);
#endif
	fact("records", "%lu", records);
	fact("words", "%lu", words);
	done();
	forget();
	free(buffer);
	return 0;
}
