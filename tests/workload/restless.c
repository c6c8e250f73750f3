/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Memory that changes all the time, in every way in which memory can.
 *
 *	restless PLACES
 *
 * There are PLACES places of 2 MB, each with a page table of its own. Each place has a page that
 * is written once, and behind it a page with a word. From "go" on, a thread goes from one place to
 * the next and does one of the following: it writes the word; it writes the present value again; it
 * gives the word's page back and reads zeros in its place; it maps the place anew; it swaps the
 * place's memory with the next one's by mremap(2), without a write. A table has the current word
 * of each place.
 *
 * facts: words, the address of the first word; table; busy, the address of the number of the place
 * that is being changed, with the next one; changes, the address of the number of changes
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/prctl.h>
#include <time.h>
#include "workload.h"

#define MOST 1000

static unsigned long table[MOST];
static volatile unsigned long busy, changes;
static unsigned long places;
static char *first, *spare;

static char *place(unsigned long number)
{
	return first + number * HUGE_PAGE;
}

static volatile unsigned long *word(unsigned long number)
{
	return (volatile unsigned long *)(place(number) + PAGE);
}

static void map_anew(char *address)
{
	if (mmap(address, HUGE_PAGE, PROT_READ | PROT_WRITE,
		 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED)
		die("no memory: %s", strerror(errno));
}

static void move(char *from, char *to)
{
	if (mremap(from, HUGE_PAGE, HUGE_PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to) != to)
		die("cannot move memory: %s", strerror(errno));
}

static void swap(unsigned long number)
{
	unsigned long one = table[number];

	move(place(number), spare);
	move(place(number + 1), place(number));
	move(spare, place(number + 1));
	table[number] = table[number + 1];
	table[number + 1] = one;
}

static void change(unsigned long number)
{
	switch (changes % 7) {
	case 0:
	case 1:
		*word(number) = table[number] = changes + 1;
		break;
	case 2:
		*word(number) = table[number];
		break;
	case 3:
		if (madvise(place(number) + PAGE, PAGE, MADV_DONTNEED))
			die("cannot give memory back: %s", strerror(errno));
		table[number] = *word(number);
		break;
	case 4:
		map_anew(place(number));
		table[number] = 0;
		break;
	default:
		swap(number);
	}
}

static void *run(void *nothing)
{
	const struct timespec moment = { .tv_nsec = 100000 };

	(void)nothing;
	for (unsigned long number = 0;; number = (number + 1) % (places - 1)) {
		busy = number;
		__sync_synchronize();
		change(number);
		__sync_synchronize();
		changes++;
		nanosleep(&moment, NULL);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	pthread_t thread;
	char *room;

	if (argc != 2)
		usage("PLACES");
	places = count(argv[1]);
	if (places < 2 || places > MOST)
		die("2 to %d places", MOST);
	if (prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0))
		die("cannot do without huge pages: %s", strerror(errno));
	room = mmap(NULL, (places + 2) * HUGE_PAGE, PROT_NONE,
		    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (room == MAP_FAILED)
		die("no room: %s", strerror(errno));
	spare = (char *)(((size_t)room + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1));
	first = spare + HUGE_PAGE;
	for (unsigned long number = 0; number < places; number++) {
		map_anew(place(number));
		*place(number) = 1;
		*word(number) = table[number] = 1000 + number;
	}
	ready();
	if (pthread_create(&thread, NULL, run, NULL))
		die("no thread");
	fact("words", "%lu", (size_t)word(0));
	fact("table", "%lu", (size_t)table);
	fact("busy", "%lu", (size_t)&busy);
	fact("changes", "%lu", (size_t)&changes);
	done();
	return 0;
}
