// SPDX-License-Identifier: BSD-2-Clause
/*
 * fuse WHAT FOLDER: maps a file of a file system of its own (FUSE, without libfuse),
 * mounted on FOLDER, whose server answers no read. WHAT is
 *
 *	lock    a child reads that memory of this process, which holds the lock of the
 *	        address space (mmap_lock) for ever
 *	queue   as lock; then this process waits for the lock itself, to map memory, and
 *	        whoever wants the lock later waits as well
 *	java    exports the symbols of HotSpot, whose tables are in that memory
 *
 * facts: none
 */
#include "hostile.h"
#include <linux/fuse.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/uio.h>

#define FILE_BYTES (1UL << 20)
#define FILE_NODE  2

/* What HotSpot exports for debuggers: where its tables are, and their layout. */
const void *gHotSpotVMStructs, *gHotSpotVMTypes;
#define EXPORTED(name, value) const unsigned long gHotSpotVM##name = value
EXPORTED(StructEntryTypeNameOffset, 0);
EXPORTED(StructEntryFieldNameOffset, 8);
EXPORTED(StructEntryTypeStringOffset, 16);
EXPORTED(StructEntryIsStaticOffset, 24);
EXPORTED(StructEntryOffsetOffset, 32);
EXPORTED(StructEntryAddressOffset, 40);
EXPORTED(StructEntryArrayStride, 48);
EXPORTED(TypeEntryTypeNameOffset, 0);
EXPORTED(TypeEntrySizeOffset, 24);
EXPORTED(TypeEntryArrayStride, 32);

/* Pipe with a byte for each read that the server does not answer. */
static int asked[2];

static void put(const char *path, const char *text)
{
	int file = open(path, O_WRONLY);

	if (file < 0 || write(file, text, strlen(text)) < 0)
		die("cannot write %s: %s", path, strerror(errno));
	close(file);
}

static void reply(int device, uint64_t request, int error, void *answer, size_t bytes)
{
	struct fuse_out_header head = { sizeof(head) + bytes, error, request };
	struct iovec parts[] = { { &head, sizeof(head) }, { answer, bytes } };

	if (writev(device, parts, bytes ? 2 : 1) < 0 && errno != ENOENT)
		die("cannot answer: %s", strerror(errno));
}

static struct fuse_attr attributes(uint64_t node)
{
	bool file = node == FILE_NODE;

	return (struct fuse_attr){
		.ino = node,
		.size = file ? FILE_BYTES : 0,
		.mode = file ? S_IFREG | 0666 : S_IFDIR | 0755,
		.nlink = 1,
		.blksize = PAGE,
	};
}

/* Answers everything but reads. */
static void serve(int device)
{
	static char buffer[1 << 18];
	struct fuse_in_header *in = (void *)buffer;

	for (;;) {
		struct fuse_init_out init = { .major = 7, .minor = 31, .max_write = 1 << 17 };
		struct fuse_entry_out entry = { .nodeid = FILE_NODE,
						.attr = attributes(FILE_NODE) };
		struct fuse_attr_out attr = { .attr_valid = 10000 };
		struct fuse_open_out opened = { .fh = 1, .open_flags = FOPEN_KEEP_CACHE };

		if (read(device, buffer, sizeof(buffer)) < 0) {
			if (errno == ENODEV)
				return;
			continue;
		}
		switch (in->opcode) {
		case FUSE_INIT:
			reply(device, in->unique, 0, &init, sizeof(init));
			break;
		case FUSE_LOOKUP:
			reply(device, in->unique, 0, &entry, sizeof(entry));
			break;
		case FUSE_GETATTR:
			attr.attr = attributes(in->nodeid);
			reply(device, in->unique, 0, &attr, sizeof(attr));
			break;
		case FUSE_OPEN:
			reply(device, in->unique, 0, &opened, sizeof(opened));
			break;
		case FUSE_RELEASE:
		case FUSE_FLUSH:
			reply(device, in->unique, 0, NULL, 0);
			break;
		case FUSE_READ:
			if (write(asked[1], "r", 1) != 1)
				die("cannot tell of a read: %s", strerror(errno));
			break;
		case FUSE_FORGET:
		case FUSE_INTERRUPT:
		case FUSE_BATCH_FORGET:
			break;
		default:
			reply(device, in->unique, -ENOSYS, NULL, 0);
		}
	}
}

/* Forks a child that ends with this process. Returns 0 in the child. */
static pid_t fork_child(void)
{
	pid_t child = fork();

	if (child < 0)
		die("cannot fork: %s", strerror(errno));
	if (!child)
		prctl(PR_SET_PDEATHSIG, SIGKILL);
	return child;
}

/* Makes a user namespace, in which the user may mount. */
static void enter_namespaces(void)
{
	char text[64];
	uid_t user = getuid();
	gid_t group = getgid();

	prctl(PR_SET_DUMPABLE, 1);
	if (unshare(CLONE_NEWUSER | CLONE_NEWNS))
		die("cannot make namespaces: %s", strerror(errno));
	put("/proc/self/setgroups", "deny");
	snprintf(text, sizeof(text), "0 %u 1", user);
	put("/proc/self/uid_map", text);
	snprintf(text, sizeof(text), "0 %u 1", group);
	put("/proc/self/gid_map", text);
}

/*
 * Maps a file of a file system of our own. In a user namespace that lacks root, reads by root
 * fail at once; so for these root mounts, as fusermount (setuid) does for any user.
 */
static char *map_own_file(const char *folder, bool for_root)
{
	char text[256];
	int device, user = 0;

	if (for_root) {
		user = getuid() ? (int)getuid() : 65534;
		if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL))
			die("cannot make a namespace: %s; run as root", strerror(errno));
	} else {
		drop_root();
		enter_namespaces();
	}
	device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
	snprintf(text, sizeof(text), "fd=%d,rootmode=40000,user_id=%d,group_id=%d", device, user,
		 user);
	if (device < 0 || mount("hostile", folder, "fuse", MS_NOSUID | MS_NODEV, text))
		die("cannot mount on %s: %s", folder, strerror(errno));
	if (for_root)
		drop_root();
	if (pipe(asked))
		die("cannot open a pipe: %s", strerror(errno));
	if (!fork_child()) {
		serve(device);
		_exit(0);
	}
	close(device);
	snprintf(text, sizeof(text), "%s/file", folder);

	int file = open(text, O_RDWR);
	char *memory = mmap(NULL, FILE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);

	if (file < 0 || memory == MAP_FAILED)
		die("cannot map %s: %s", text, strerror(errno));
	return memory;
}

/* Has a child read memory of this process, and returns when the server has the request. */
static void hold_lock(const char *memory)
{
	char path[64], byte;
	pid_t parent = getpid();

	prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
	if (!fork_child()) {
		snprintf(path, sizeof(path), "/proc/%d/mem", parent);
		if (pread(open(path, O_RDONLY), &byte, 1, (off_t)memory) < 0)
			die("cannot read %s: %s", path, strerror(errno));
		_exit(0);
	}
	if (read(asked[0], &byte, 1) != 1)
		die("the server has ended");
}

int main(int argc, char **argv)
{
	if (argc != 3)
		usage("lock|queue|java FOLDER");

	bool java = !strcmp(argv[1], "java");
	char *memory = map_own_file(argv[2], java);

	bool queue = !strcmp(argv[1], "queue");

	if (queue || !strcmp(argv[1], "lock"))
		hold_lock(memory);
	else if (java)
		gHotSpotVMStructs = memory, gHotSpotVMTypes = memory + PAGE;
	else
		usage("lock|queue|java FOLDER");
	ready();
	if (queue)
		map_pages(1);
	done();
	return 0;
}
