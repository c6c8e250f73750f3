// SPDX-License-Identifier: BSD-2-Clause
/*
 * Becomes or starts PROGRAM in a way in which its tracer can lose it, and ends when
 * it does.
 *
 * thread: the program is called by exec(2) in a second thread, which takes over
 *         the process's number
 * spawn:  in a child that shares its parent's memory until then
 * orphan: in a grandchild whose parent has exited
 *
 * facts: none; it says nothing itself.
 */
#include "workload.h"

#include <pthread.h>
#include <spawn.h>

static char **program;

static void *become(void *unused)
{
	execv(program[0], program);
	die("cannot run %s: %s", program[0], strerror(errno));
	return unused;
}

int main(int argc, char **argv)
{
	int status = 0, error, ends[2];
	pthread_t thread;
	pid_t child;
	char byte;

	if (argc < 3)
		usage("thread|spawn|orphan PROGRAM [ARGUMENT...]");
	program = argv + 2;
	if (!strcmp(argv[1], "thread")) {
		error = pthread_create(&thread, NULL, become, NULL);
		if (error)
			die("cannot start a thread: %s", strerror(error));
		pause();
	} else if (!strcmp(argv[1], "spawn")) {
		error = posix_spawn(&child, program[0], NULL, NULL, program, environ);
		if (error)
			die("cannot run %s: %s", program[0], strerror(error));
		waitpid(child, &status, 0);
	} else {
		/* The program has it open for writing, too: it ends with it. */
		if (pipe(ends))
			die("no pipe: %s", strerror(errno));
		child = fork();
		if (!child) {
			if (!fork())
				become(NULL);
			_exit(0);
		}
		waitpid(child, &status, 0);
		close(ends[1]);
		if (read(ends[0], &byte, 1))
			die("something writes to the pipe");
	}
	return status != 0;
}
