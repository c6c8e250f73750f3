// SPDX-License-Identifier: BSD-2-Clause
/*
 * crowd KIND NUMBER CALLS [FOLDER]: as an unprivileged user, uses more of something
 * than a tool may keep at once.
 *
 * KIND:
 *	files		maps NUMBER files of FOLDER executable, named 0, 1 ...,
 *			and makes CALLS calls of brk(2)
 *	processes	NUMBER processes that live at once, each of which makes
 *			CALLS calls
 *	mappings	has NUMBER mappings of code, one of which changes every 500 us
 *			from "ready" on, with CALLS calls in between; it ends when it
 *			may go on
 *
 *	programs	NUMBER children one after the other, each of which executes
 *			this program, which makes CALLS calls of brk(2)
 *	itself		a child that executes this program NUMBER times, with CALLS
 *			calls each time
 *	threads		NUMBER threads, eight at a time, each of which allocates CALLS
 *			blocks of 24 bytes and frees all but one
 *
 *	Further kinds do something NUMBER times. Each time, they also make CALLS calls
 *	of brk(2) and keep a block of 24 bytes:
 *
 *	pages		maps a page that stays, every other one executable
 *	unmapped	maps this program executable, and unmaps it
 *	written		writes a file of FOLDER, maps it executable, and unmaps and removes it
 *	loaded		loads the library FOLDER/l.so, and unloads it
 *
 * facts: brk (calls), kept (blocks)
 */
#include "hostile.h"
#include <dlfcn.h>
#include <pthread.h>
#include <sys/wait.h>

static unsigned long number, calls;
static volatile bool stop;

STEP static void call_brk(void)
{
	for (unsigned long i = 0; i < calls; i++)
		syscall(SYS_brk, 0);
}

static void map_files(const char *folder)
{
	char path[4096];

	for (unsigned long i = 0; i < number; i++) {
		snprintf(path, sizeof(path), "%s/%lu", folder, i);
		int fd = open(path, O_RDONLY | O_CLOEXEC);

		if (fd < 0 ||
		    mmap(NULL, PAGE, PROT_READ | PROT_EXEC, MAP_PRIVATE, fd, 0) == MAP_FAILED)
			die("cannot map %s: %s", path, strerror(errno));
		close(fd);
	}
}

/* Starts the processes. Each of them waits until all are started, and lives as long as the
 * program. */
static void fork_processes(void)
{
	int start[2], end[2], finished[2];
	char byte;

	if (pipe(start) || pipe(end) || pipe(finished))
		die("no pipe");
	for (unsigned long i = 0; i < number; i++) {
		pid_t child = fork();

		if (child < 0)
			die("cannot fork: %s", strerror(errno));
		if (child)
			continue;
		close(start[1]);
		close(end[1]);
		if (read(start[0], &byte, 1))
			_exit(1);
		call_brk();
		if (write(finished[1], "", 1) != 1 || read(end[0], &byte, 1))
			_exit(1);
		_exit(0);
	}
	close(start[1]);
	for (unsigned long i = 0; i < number; i++)
		if (read(finished[0], &byte, 1) != 1)
			die("a process is gone");
}

static void *change_mappings(void *unused)
{
	char *all = mmap(NULL, 2 * number * PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	(void)unused;
	if (all == MAP_FAILED)
		die("cannot map memory: %s", strerror(errno));
	for (unsigned long i = 0; !stop; i++) {
		int executable = i / number % 2 ? 0 : PROT_EXEC;

		if (mprotect(all + 2 * (i % number) * PAGE, PAGE, PROT_READ | executable))
			die("cannot change a mapping: %s", strerror(errno));
		call_brk();
		usleep(500);
	}
	return NULL;
}

/* Executes this program again, to do `what` with `left` executions left. */
static void execute(const char *what, unsigned long left)
{
	char left_text[24], calls_text[24];

	snprintf(left_text, sizeof(left_text), "%lu", left);
	snprintf(calls_text, sizeof(calls_text), "%lu", calls);
	execl("/proc/self/exe", "crowd", what, left_text, calls_text, NULL);
	_exit(1);
}

/* Starts a child that executes `programs` programs, one after the other. */
static void run_programs(unsigned long programs)
{
	int status;
	pid_t child = fork();

	if (!child)
		execute("again", programs);
	if (child < 0 || waitpid(child, &status, 0) != child || status)
		die("a program was not run");
}

/* Main part of an executed program, which does not wait to be ready. */
static void go_on(void)
{
	call_brk();
	if (number > 1)
		execute("again", number - 1);
	_exit(0);
}

static void *volatile kept;

STEP static void keep_block(void)
{
	kept = malloc(24);
	__asm__ volatile(""); /* or the call would be a jump */
}

static void *allocate(void *unused)
{
	for (unsigned long i = 1; i < calls; i++) {
		void *volatile block = malloc(24);

		free(block);
	}
	keep_block();
	return unused;
}

static void run_threads(void)
{
	pthread_t threads[8];

	for (unsigned long i = 0; i < number + 8; i++) {
		pthread_t *thread = &threads[i % 8];

		if (i >= 8 && pthread_join(*thread, NULL))
			die("a thread is gone");
		if (i < number && pthread_create(thread, NULL, allocate, NULL))
			die("cannot start a thread");
	}
}

static void *map_code(const char *path, int flags)
{
	int file = open(path, flags | O_CLOEXEC, 0755);

	if (file < 0 || (flags & O_CREAT && write(file, "", 1) != 1))
		die("cannot open %s: %s", path, strerror(errno));
	void *code = mmap(NULL, PAGE, PROT_READ | PROT_EXEC, MAP_PRIVATE, file, 0);

	close(file);
	if (code == MAP_FAILED)
		die("cannot map %s: %s", path, strerror(errno));
	return code;
}

static void map_page(bool executable)
{
	int protection = PROT_READ | (executable ? PROT_EXEC : PROT_WRITE);

	if (mmap(NULL, PAGE, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED)
		die("cannot map a page: %s", strerror(errno));
}

static void write_and_map(const char *folder, unsigned long name)
{
	char path[4096];

	snprintf(path, sizeof(path), "%s/%lu", folder, name);
	munmap(map_code(path, O_CREAT | O_RDWR), PAGE);
	unlink(path);
}

static void load_and_unload(const char *folder)
{
	char path[4096];

	snprintf(path, sizeof(path), "%s/l.so", folder);
	void *library = dlopen(path, RTLD_NOW);

	if (!library || dlclose(library))
		die("cannot load or unload a library: %s", dlerror());
}

/* Does what `kind` says, NUMBER times. Returns whether the kind is known. */
static bool map_again_and_again(const char *kind, const char *folder)
{
	for (unsigned long i = 0; i < number; i++) {
		if (!strcmp(kind, "pages"))
			map_page(i % 2);
		else if (!strcmp(kind, "unmapped"))
			munmap(map_code("/proc/self/exe", O_RDONLY), PAGE);
		else if (!strcmp(kind, "written") && folder)
			write_and_map(folder, i);
		else if (!strcmp(kind, "loaded") && folder)
			load_and_unload(folder);
		else
			return false;
		call_brk();
		keep_block();
	}
	fact("kept", "%lu", number);
	return true;
}

int main(int argc, char **argv)
{
	unsigned long made = 0;
	pthread_t thread;

	if (argc != 4 && argc != 5)
		usage("KIND NUMBER CALLS [FOLDER]");
	number = count(argv[2]);
	calls = count(argv[3]);
	if (!strcmp(argv[1], "again"))
		go_on();
	drop_root();
	/* Leaves the CPU to other processes, which have work to do, too. */
	if (setpriority(PRIO_PROCESS, 0, 19))
		die("cannot lower the priority: %s", strerror(errno));
	if (!strcmp(argv[1], "mappings") && pthread_create(&thread, NULL, change_mappings, NULL))
		die("cannot start a thread");
	ready();
	if (!strcmp(argv[1], "files") && argc == 5) {
		map_files(argv[4]);
		call_brk();
		made = calls;
	} else if (!strcmp(argv[1], "processes")) {
		fork_processes();
		made = number * calls;
	} else if (!strcmp(argv[1], "programs")) {
		for (unsigned long i = 0; i < number; i++)
			run_programs(1);
		made = number * calls;
	} else if (!strcmp(argv[1], "itself")) {
		run_programs(number);
		made = number * calls;
	} else if (!strcmp(argv[1], "threads")) {
		run_threads();
		fact("kept", "%lu", number);
	} else if (!strcmp(argv[1], "mappings")) {
		stop = true;
		pthread_join(thread, NULL);
	} else if (map_again_and_again(argv[1], argv[4])) {
		made = number * calls;
	} else {
		die("'%s' is no kind, or has no folder", argv[1]);
	}
	fact("brk", "%lu", made);
	done();
	return 0;
}
