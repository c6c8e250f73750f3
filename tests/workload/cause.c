// SPDX-License-Identifier: BSD-2-Clause
/*
 * A trouble of the machine's memory of which the cause is known: MB megabytes at
 * once and, from the next "go" on, up to MORE, one every tenth of a second. All
 * are held until it is killed.
 *
 *   slabs   messages of the kernel's, in the buffers of sockets that nobody reads
 *   tables  page tables, for a page in each 2 MB of what nobody has written to
 *   tmpfs   a file in /dev/shm, which is left there: FILE is its name
 *   maps    arrays for BPF programs, which the kernel has in its vmalloc area
 *   pipes   what was written to pipes that nobody reads
 *
 * facts: none
 */
#include "workload.h"
#include <linux/bpf.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>

/* With what the kernel has before and behind it, a message takes 2 KB, and its head 256 bytes. */
#define MESSAGE	      1500
#define MESSAGE_TAKES (2048 + 256)
#define MEGABYTE      (1UL << 20)

/* A message that fits in the socket's buffer, which is never empty again. */
STEP static int send_message(int socket)
{
	static const char message[MESSAGE];

	return send(socket, message, sizeof(message), MSG_DONTWAIT) == sizeof(message);
}

STEP static void take_slabs(void)
{
	static int sockets[2] = { -1, -1 };

	for (unsigned long taken = 0; taken < MEGABYTE; taken += MESSAGE_TAKES) {
		if (sockets[0] >= 0 && send_message(sockets[0]))
			continue;
		int bytes = 4 * MEGABYTE;

		if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) ||
		    setsockopt(sockets[0], SOL_SOCKET, SO_SNDBUFFORCE, &bytes, sizeof(bytes)))
			die("no socket: %s", strerror(errno));
	}
}

STEP static void take_tables(void)
{
	const unsigned long tables = MEGABYTE / PAGE;
	const unsigned long pages = PAGE / sizeof(long);

	read_pages(map_pages(tables * pages), tables, pages * PAGE);
}

static const char *file;

STEP static void take_tmpfs(void)
{
	static int fd = -1;
	static const char zeros[MEGABYTE];

	if (fd < 0)
		fd = open(file, O_WRONLY | O_CREAT | O_APPEND, 0600);
	if (write(fd, zeros, sizeof(zeros)) != sizeof(zeros))
		die("cannot write to %s: %s", file, strerror(errno));
}

/* Until 5.10, maps count as locked memory, root's too. */
static void lock_without_limit(void)
{
	const struct rlimit none = {
		.rlim_cur = RLIM_INFINITY,
		.rlim_max = RLIM_INFINITY,
	};

	if (setrlimit(RLIMIT_MEMLOCK, &none))
		die("cannot raise ulimit -l: %s; run as root", strerror(errno));
}

STEP static void take_map(void)
{
	union bpf_attr attributes = {
		.map_type = BPF_MAP_TYPE_ARRAY,
		.key_size = sizeof(int),
		.value_size = PAGE,
		.max_entries = MEGABYTE / PAGE,
	};

	lock_without_limit();
	if (syscall(SYS_bpf, BPF_MAP_CREATE, &attributes, sizeof(attributes)) < 0)
		die("no map: %s", strerror(errno));
}

STEP static void take_pipe(void)
{
	static const char data[MEGABYTE];
	int ends[2];

	if (pipe(ends) || fcntl(ends[1], F_SETPIPE_SZ, MEGABYTE) < 0)
		die("no pipe of a megabyte: %s", strerror(errno));
	if (write(ends[1], data, sizeof(data)) != sizeof(data))
		die("cannot fill a pipe: %s", strerror(errno));
}

int main(int argc, char **argv)
{
	const struct timespec tenth = {
		.tv_nsec = 100000000,
	};
	unsigned long first, more;
	void (*take)(void);

	if (argc != 4 && argc != 5)
		usage("slabs|tables|tmpfs|maps|pipes MB MORE [FILE]");
	first = count(argv[2]);
	more = count(argv[3]);
	file = argc > 4 ? argv[4] : NULL;
	if (!strcmp(argv[1], "slabs"))
		take = take_slabs;
	else if (!strcmp(argv[1], "tables"))
		take = take_tables;
	else if (!strcmp(argv[1], "tmpfs") && file)
		take = take_tmpfs;
	else if (!strcmp(argv[1], "maps"))
		take = take_map;
	else if (!strcmp(argv[1], "pipes"))
		take = take_pipe;
	else
		usage("slabs|tables|tmpfs|maps|pipes MB MORE [FILE]");
	ready();
	for (unsigned long i = 0; i < first; i++)
		take();
	done();
	for (unsigned long i = 0; i < more; i++) {
		nanosleep(&tenth, NULL);
		take();
	}
	for (;;)
		pause();
}
