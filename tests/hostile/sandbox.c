// SPDX-License-Identifier: BSD-2-Clause
/*
 * sandbox BLOCKS BYTES: allocates BLOCKS blocks that it keeps, and as many that it
 * frees, under a seccomp filter that permits only the system calls for that. Any other
 * system call kills the process, as in the sandboxes of browsers.
 *
 * facts: kept (blocks)
 */
#include "../workload/workload.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>

static void *volatile kept;

STEP static void keep(unsigned long bytes)
{
	kept = malloc(bytes);
}

STEP static void give_back(unsigned long bytes)
{
	void *volatile block = malloc(bytes);

	free(block);
}

static void enter_sandbox(void)
{
	static const int permitted[] = { SYS_read,   SYS_getpid, SYS_write,	 SYS_brk,  SYS_mmap,
					 SYS_munmap, SYS_mremap, SYS_exit_group, SYS_futex };
	enum { N = sizeof(permitted) / sizeof(permitted[0]) };
	struct sock_filter code[N + 3];
	struct sock_fprog program = { .len = N + 3, .filter = code };

	code[0] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
					       offsetof(struct seccomp_data, nr));
	for (int i = 0; i < N; i++)
		code[1 + i] =
		    (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, permitted[i], N - i, 0);
	code[N + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
	code[N + 2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
	    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		die("cannot set a seccomp filter: %s", strerror(errno));
}

int main(int argc, char **argv)
{
	if (argc != 3)
		usage("BLOCKS BYTES");
	unsigned long blocks = count(argv[1]), bytes = count(argv[2]);

	/* The first call takes memory from the kernel, so it comes before the sandbox. */
	give_back(bytes);
	enter_sandbox();
	ready();
	for (unsigned long i = 0; i < blocks; i++) {
		keep(bytes);
		give_back(bytes);
	}
	fact("kept", "%lu", blocks);
	done();
	return 0;
}
