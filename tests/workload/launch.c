// SPDX-License-Identifier: BSD-2-Clause
/*
 * Becomes or starts PROGRAM in a way in which its tracer can lose it, and ends when
 * it does.
 *
 * thread: the program is executed by a second thread, which takes over the
 *         process's PID
 * spawn:  in a child that shares its parent's memory until then
 * orphan: in a grandchild whose parent has exited
 * children: in 23 children, one after the other
 * jobs:   in 23 children, each in a process group of its own, like a shell's jobs
 *
 * facts: of children and jobs, how many of their stops were seen; else none.
 */
#include "workload.h"

#include <pthread.h>
#include <spawn.h>

#define CHILDREN 23

static char **program;

static void *become(void *unused)
{
	execv(program[0], program);
	die("cannot run %s: %s", program[0], strerror(errno));
	return unused;
}

/* Runs the program in a child. Returns the number of stops that were seen meanwhile. */
static int run_child(bool is_job)
{
	int status, stops = 0;
	pid_t child = fork();

	if (!child) {
		if (is_job && setpgid(0, 0))
			die("no process group: %s", strerror(errno));
		become(NULL);
	}
	while (waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status))
		stops++;
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		die("child %d ended with %#x", child, status);
	return stops;
}

int main(int argc, char **argv)
{
	int status = 0, stops = 0, error, ends[2];
	bool is_job;
	pthread_t thread;
	pid_t child;
	char byte;

	if (argc < 3)
		usage("thread|spawn|orphan|children|jobs PROGRAM [ARGUMENT...]");
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
	} else if (strcmp(argv[1], "orphan")) {
		is_job = !strcmp(argv[1], "jobs");
		for (int i = 0; i < CHILDREN; i++)
			stops += run_child(is_job);
		printf("stops=%d\n", stops);
	} else {
		/* The program has the pipe open for writing, too, so the pipe ends with the
		 * program. */
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
