// SPDX-License-Identifier: BSD-2-Clause
/*
 * A memory problem of the machine whose cause is known: takes MB megabytes at
 * once and, from the next "go" on, up to MORE further ones, one every tenth of a
 * second. All are held until the program is killed.
 *
 *   slabs   messages of the kernel, in the buffers of sockets that nobody reads
 *   tables  page tables: one page is read in each 2 MB of memory that is not written to
 *   tmpfs   a file in /dev/shm, which is left there: FILE is its name
 *   maps    arrays for BPF programs, which the kernel has in its vmalloc area
 *   pipes   bytes in pipes that nobody reads
 *   shm     System V segments of a megabyte each, which nobody has attached; they are left behind
 *   memfd   a file without a name
 *   huge    transparent huge pages, with one byte written to each
 *   vmas    mappings of a page each
 *   copies  pages that a child shares, and that are copied when they are written to
 *   cgroups removed cgroups, one instead of each megabyte, in the folder FILE. Each has a socket,
 *           which keeps it, and a page of a file in /dev/shm without a name
 *
 * facts: none
 */
#include "workload.h"
#include <linux/bpf.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>

/* A message takes 2 KB, with the kernel's data before and behind it, and its header takes 256
 * bytes. */
#define MESSAGE	      1500
#define MESSAGE_TAKES (2048 + 256)
#define MEGABYTE      (1UL << 20)

/* Sends a message that fits into the socket's buffer, which is never emptied. */
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

/* Appends a megabyte to a file. */
STEP static void append(int fd, const char *name)
{
	static const char zeros[MEGABYTE];

	if (write(fd, zeros, sizeof(zeros)) != sizeof(zeros))
		die("cannot write to %s: %s", name, strerror(errno));
}

STEP static void take_tmpfs(void)
{
	static int fd = -1;

	if (fd < 0)
		fd = open(file, O_WRONLY | O_CREAT | O_APPEND, 0600);
	append(fd, file);
}

STEP static void take_memfd(void)
{
	static int fd = -1;

	if (fd < 0)
		fd = memfd_create("cause", 0);
	append(fd, "a file without a name");
}

STEP static void take_shm(void)
{
	int id = shmget(IPC_PRIVATE, MEGABYTE, IPC_CREAT | 0600);
	char *at = id < 0 ? (char *)-1 : shmat(id, NULL, 0);

	if (at == (char *)-1)
		die("no segment: %s", strerror(errno));
	write_pages(at, MEGABYTE / PAGE, PAGE);
	shmdt(at);
}

/* Takes a huge page instead of every two megabytes. */
STEP static void take_huge(void)
{
	static char *end;
	static unsigned long taken;
	const unsigned long room = 4096 * HUGE_PAGE;

	if (!end) {
		char *at = map_pages(room / PAGE);

		end = (char *)(((unsigned long)at + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1));
		if (madvise(end, room - HUGE_PAGE, MADV_HUGEPAGE))
			die("no huge pages: %s", strerror(errno));
	}
	if (taken++ % 2)
		return;
	write_pages(end, 1, PAGE);
	end += HUGE_PAGE;
}

/* Neighbouring mappings with the same rights would be merged. */
STEP static void take_vmas(void)
{
	char *at = map_pages(MEGABYTE / PAGE);

	if (madvise(at, MEGABYTE, MADV_NOHUGEPAGE))
		die("madvise: %s", strerror(errno));
	write_pages(at, MEGABYTE / PAGE, PAGE);
	for (unsigned long page = 0; page < MEGABYTE / PAGE; page += 2)
		if (mprotect(at + page * PAGE, PAGE, PROT_READ))
			die("mprotect: %s", strerror(errno));
}

static char *shared;

/* Makes pages that a child shares. The child is killed when this process ends. */
static void share(unsigned long megabytes)
{
	const unsigned long pages = megabytes * MEGABYTE / PAGE;

	shared = map_pages(pages);
	if (madvise(shared, megabytes * MEGABYTE, MADV_NOHUGEPAGE))
		die("madvise: %s", strerror(errno));
	write_pages(shared, pages, PAGE);
	if (fork())
		return;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (;;)
		pause();
}

STEP static void take_copies(void)
{
	write_pages(shared, MEGABYTE / PAGE, PAGE);
	shared += MEGABYTE;
}

/* Moves this process into a cgroup. */
static void join(const char *cgroup)
{
	char procs[512];
	int fd;

	snprintf(procs, sizeof(procs), "%s/cgroup.procs", cgroup);
	fd = open(procs, O_WRONLY);
	if (fd < 0 || write(fd, "0", 1) != 1)
		die("cannot join %s: %s", cgroup, strerror(errno));
	close(fd);
}

STEP static void take_cgroup(void)
{
	static const char page[PAGE];
	static int number, fd = -1;
	char cgroup[400];

	if (fd < 0)
		fd = memfd_create("cause", 0);
	snprintf(cgroup, sizeof(cgroup), "%s/%d", file, number++);
	if (mkdir(cgroup, 0755))
		die("cannot make %s: %s", cgroup, strerror(errno));
	join(cgroup);
	if (socket(AF_INET, SOCK_DGRAM, 0) < 0)
		die("no socket: %s", strerror(errno));
	if (write(fd, page, sizeof(page)) != sizeof(page))
		die("cannot write: %s", strerror(errno));
	join("/sys/fs/cgroup");
	if (rmdir(cgroup))
		die("cannot remove %s: %s", cgroup, strerror(errno));
}

/* Up to 5.10, maps count as locked memory, for root, too. */
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

static const struct {
	const char *name;
	void (*take)(void);
	bool has_file;
} causes[] = {
	{ "slabs", take_slabs, false },	  { "tables", take_tables, false },
	{ "tmpfs", take_tmpfs, true },	  { "maps", take_map, false },
	{ "pipes", take_pipe, false },	  { "shm", take_shm, false },
	{ "memfd", take_memfd, false },	  { "huge", take_huge, false },
	{ "copies", take_copies, false }, { "cgroups", take_cgroup, true },
	{ "vmas", take_vmas, false },
};

int main(int argc, char **argv)
{
	const struct timespec tenth = {
		.tv_nsec = 100000000,
	};
	unsigned long first, more;
	void (*take)(void) = NULL;

	file = argc == 5 ? argv[4] : NULL;
	for (size_t i = 0; argc > 1 && i < sizeof(causes) / sizeof(causes[0]); i++)
		if (!strcmp(argv[1], causes[i].name) && causes[i].has_file == (argc == 5))
			take = causes[i].take;
	if (!take || argc > 5)
		usage("slabs|tables|maps|pipes|shm|memfd|huge|copies|vmas MB MORE, tmpfs|cgroups "
		      "MB MORE FILE");
	first = count(argv[2]);
	more = count(argv[3]);
	if (take == take_copies)
		share(first + more);
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
