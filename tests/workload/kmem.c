// SPDX-License-Identifier: BSD-2-Clause
/*
 * Kmem: makes the kernel allocate, holds the objects until it may go on, and then
 * undoes its work:
 *
 *	pipes COUNT          pipes: each two files, an inode and a dentry
 *	sockets COUNT        UNIX sockets: each a file, an inode and a dentry
 *	files COUNT          open files of /dev/null
 *	messages COUNT SIZE  System V messages of SIZE bytes behind their headers
 *	members COUNT        memberships in a multicast group, freed by kfree_rcu()
 *	ring PAGES           a pipe with a capacity of PAGES pages: one object if large
 *	buffers PAGES        PAGES pages in pipes, 16 in each
 *	memory PAGES         PAGES pages of a memory file
 *	slots COUNT          per-CPU values of 8 bytes, of a BPF map
 *	inodes COUNT         files in a tmpfs of its own, each an inode; undoing does nothing
 *	churn COUNT          opens and closes a file COUNT times; undoing does nothing
 *
 * facts: allocated: COUNT or PAGES
 */
#include "workload.h"

#include <arpa/inet.h>
#include <linux/bpf.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/ipc.h>
#include <sys/mount.h>
#include <sys/msg.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#define MAX_FDS	     4096
#define PIPE_BUFFERS 16

static int fds[MAX_FDS];
static unsigned long opened;
static char page[PAGE];

/* Keeps a descriptor until undo(). */
static int keep(int fd, const char *of)
{
	if (fd < 0)
		die("cannot make %s: %s", of, strerror(errno));
	if (opened == MAX_FDS)
		die("more than %d descriptors; use a smaller count", MAX_FDS);
	fds[opened++] = fd;
	return fd;
}

static int make_pipe(void)
{
	int ends[2];

	if (pipe(ends))
		die("cannot make a pipe: %s", strerror(errno));
	keep(ends[0], "a pipe");
	return keep(ends[1], "a pipe");
}

static int make_queue(void)
{
	int queue = msgget(IPC_PRIVATE, 0600);

	if (queue < 0)
		die("cannot make a message queue: %s", strerror(errno));
	return queue;
}

static void send_message(int queue, unsigned long size)
{
	static struct {
		long type;
		char text[8192];
	} message = { 1, "" };

	if (size > sizeof(message.text) || msgsnd(queue, &message, size, IPC_NOWAIT))
		die("cannot send a message of %lu bytes: %s; a queue holds 16384", size,
		    strerror(errno));
}

static const struct ip_mreq group = {
	.imr_multiaddr = { 0xfb0000e0 }, /* 224.0.0.251 */
	.imr_interface = { 0x0100007f }, /* 127.0.0.1 */
};

static void set_membership(int fd, int option)
{
	if (setsockopt(fd, IPPROTO_IP, option, &group, sizeof(group)))
		die("cannot change a multicast membership of lo: %s", strerror(errno));
}

static int make_slots(unsigned long count)
{
	/* Kernels before 5.11 charge maps against the limit of locked memory. */
	struct rlimit unlimited = { RLIM_INFINITY, RLIM_INFINITY };
	union bpf_attr attr = {
		.map_type = BPF_MAP_TYPE_PERCPU_ARRAY,
		.key_size = 4,
		.value_size = 8,
		.max_entries = count,
	};

	setrlimit(RLIMIT_MEMLOCK, &unlimited);
	return syscall(SYS_bpf, BPF_MAP_CREATE, &attr, sizeof(attr));
}

/* Makes a file system of this program's own the current folder from here on. */
static void enter_tmpfs(void)
{
	/* The new name keeps tests that run at the same time and look for the old one from
	 * finding this program. */
	prctl(PR_SET_NAME, "inodes");
	if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
	    mount("kmem", "/tmp", "tmpfs", 0, "nr_inodes=0") || chdir("/tmp"))
		die("cannot mount a tmpfs: %s; run as root", strerror(errno));
}

static void make_inode(unsigned long number)
{
	char name[24];

	snprintf(name, sizeof(name), "%lu", number);
	if (mknod(name, S_IFREG | 0600, 0))
		die("cannot make a file: %s", strerror(errno));
}

static void write_page(int fd)
{
	if (write(fd, page, sizeof(page)) != sizeof(page))
		die("cannot write a page: %s", strerror(errno));
}

/* Makes the table of files large enough for all descriptors, so that it does not grow. */
static void make_room_for_descriptors(void)
{
	if (dup2(0, 2 * MAX_FDS - 1) < 0) {
		struct rlimit limit = { 2 * MAX_FDS, 2 * MAX_FDS };

		if (setrlimit(RLIMIT_NOFILE, &limit) || dup2(0, 2 * MAX_FDS - 1) < 0)
			die("cannot have %lu descriptors: %s", 2UL * MAX_FDS, strerror(errno));
	}
}

/* Makes object number `i` of the kind that the command line names. Some kinds use a queue or a
 * file. */
static void make_one(const char *what, unsigned long i, int fd, unsigned long size)
{
	if (!strcmp(what, "pipes"))
		make_pipe();
	else if (!strcmp(what, "sockets"))
		keep(socket(AF_UNIX, SOCK_STREAM, 0), "a socket");
	else if (!strcmp(what, "files"))
		keep(open("/dev/null", O_RDONLY), "a file");
	else if (!strcmp(what, "messages"))
		send_message(fd, size);
	else if (!strcmp(what, "members"))
		set_membership(fds[i], IP_ADD_MEMBERSHIP);
	else if (!strcmp(what, "buffers"))
		write_page(fds[i / PIPE_BUFFERS * 2 + 1]);
	else if (!strcmp(what, "memory"))
		write_page(fd);
	else if (!strcmp(what, "inodes"))
		make_inode(i);
	else if (!strcmp(what, "churn"))
		close(open("/dev/null", O_RDONLY));
}

int main(int argc, char **argv)
{
	unsigned long number, size;
	const char *what;
	int target = -1; /* the queue or the file that objects are made by */

	if (argc < 3 || argc > 4)
		usage("WHAT COUNT [SIZE]");
	what = argv[1];
	number = count(argv[2]);
	size = argc > 3 ? count(argv[3]) : 0;
	settle();
	if (!strcmp(what, "messages"))
		target = make_queue();
	make_room_for_descriptors();
	if (!strcmp(what, "members"))
		for (unsigned long i = 0; i < number; i++)
			keep(socket(AF_INET, SOCK_DGRAM, 0), "a socket");
	if (!strcmp(what, "buffers"))
		for (unsigned long i = 0; i < number; i += PIPE_BUFFERS)
			make_pipe();
	if (!strcmp(what, "memory"))
		target = keep(memfd_create("kmem", 0), "a memory file");
	if (!strcmp(what, "ring"))
		target = make_pipe();
	if (!strcmp(what, "inodes"))
		enter_tmpfs();
	ready();

	for (unsigned long i = 0; i < number; i++)
		make_one(what, i, target, size);
	if (!strcmp(what, "ring") && fcntl(target, F_SETPIPE_SZ, number * PAGE) < 0)
		die("cannot resize a pipe: %s", strerror(errno));
	if (!strcmp(what, "slots"))
		keep(make_slots(number), "a BPF map");
	fact("allocated", "%lu", number);
	done();

	if (!strcmp(what, "members"))
		for (unsigned long i = 0; i < number; i++)
			set_membership(fds[i], IP_DROP_MEMBERSHIP);
	else
		while (opened)
			close(fds[--opened]);
	if (!strcmp(what, "messages"))
		msgctl(target, IPC_RMID, NULL);
	done();
	return 0;
}
