/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * A command that we start is stopped by a signal whenever it maps code, until user space
 * (src/stacks/unwind/held.rs) has looked at that and lets it go on. So its very first
 * stacks are complete, and allocators that it brings are probed before their first
 * call. On request what it starts is stopped, too, once for each file.
 */
#ifndef MEMTOOLS_HELD_BPF_H
#define MEMTOOLS_HELD_BPF_H

#include "filter.bpf.h"
#include "unwind.bpf.h"

#define HELD_AT_A_TIME	  256
#define SIGSTOP		  19
#define SYS_MMAP	  9
#define PROT_EXEC	  4
#define MAP_ANONYMOUS	  0x20
#define SIGNAL_UNKILLABLE 0x40

enum unwind_held_key {
	HELD_PROCESS,	  /* the command's number, 0: nothing is held */
	HELD_DESCENDANTS, /* 1: what it starts, too */
	HELD_GROUP,	  /* the address of the process group in which the command began */
	HELD_KEYS,
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, HELD_KEYS);
	__type(key, __u32);
	__type(value, __u64);
} unwind_held SEC(".maps");

/* By process, the hash of the file that it is stopped for until it is let go on; 0 just before. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, HELD_AT_A_TIME);
	__type(key, __u32);
	__type(value, __u64);
} unwind_stopped SEC(".maps");

/* By hash, files that user space has looked at while a process was stopped for them. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1); /* more where descendants are held */
	__type(key, __u64);
	__type(value, __u8);
} unwind_looked SEC(".maps");

static __always_inline __u64 held_value(__u32 key)
{
	__u64 *value = bpf_map_lookup_elem(&unwind_held, &key);

	return value ? *value : 0;
}

/*
 * Whether the current process is to be stopped. The command itself is a child of ours.
 * The parents of what it starts are told of the stop (SIGCHLD), which is nothing to
 * those that do not ask for it. So a job of a shell's is left alone, which is a
 * group of its own: the shell would report it, and the kernel would end it (SIGHUP)
 * if its group were orphaned meanwhile. So is what a debugger traces, and the
 * init of a namespace, which does not heed the signal.
 */
static __noinline bool held_is_wanted(__u32 pid)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	__u64 command = held_value(HELD_PROCESS);
	__u64 group = (__u64)BPF_CORE_READ(task, signal, pids[PIDTYPE_PGID]);
	__u32 key = HELD_GROUP;

	if (!command || !pid)
		return false;
	if (pid == command) {
		if (!held_value(HELD_GROUP))
			bpf_map_update_elem(&unwind_held, &key, &group, BPF_ANY);
		return true;
	}
	if (!held_value(HELD_DESCENDANTS) || !filter_follows(task))
		return false;
	return group == held_value(HELD_GROUP) && !BPF_CORE_READ(task, ptrace) &&
	       !(BPF_CORE_READ(task, signal, flags) & SIGNAL_UNKILLABLE);
}

/*
 * Stop the current process, which has mapped this file, unless that was looked at. One that
 * nobody could be asked to let go on is not stopped.
 */
static __noinline int held_stop(struct file *mapped)
{
	struct inode *inode = BPF_CORE_READ(mapped, f_inode);
	__u32 pid = unwind_process_of_current();
	struct unwind_request *request;
	struct mapping_file file = {};
	__u64 hash, about = 0, *stopped;

	if (!inode || !held_is_wanted(pid))
		return 0;
	mapping_describe_file(&file, inode);
	hash = mapping_file_hash(&file);
	if (bpf_map_lookup_elem(&unwind_looked, &hash))
		return 0;
	stopped = bpf_map_lookup_elem(&unwind_stopped, &pid);
	if (stopped && *stopped == hash)
		return 0; /* by the program that this one is a second to */
	if (!stopped && bpf_map_update_elem(&unwind_stopped, &pid, &about, BPF_NOEXIST))
		return 0;
	request = bpf_ringbuf_reserve(&unwind_requests, sizeof(*request), 0);
	if (!request) {
		if (!stopped)
			bpf_map_delete_elem(&unwind_stopped, &pid);
		return 0;
	}
	/* Sent first: whoever reads the hash can take the signal back by SIGCONT. */
	if (bpf_send_signal(SIGSTOP)) {
		bpf_ringbuf_discard(request, 0);
		if (!stopped)
			bpf_map_delete_elem(&unwind_stopped, &pid);
		return 0;
	}
	bpf_map_update_elem(&unwind_stopped, &pid, &hash, BPF_ANY);
	__builtin_memset(request, 0, sizeof(*request));
	request->held_file = hash;
	request->pid = pid;
	bpf_ringbuf_submit(request, 0);
	return 0;
}

static __noinline int held_exec(struct bpf_raw_tracepoint_args *ctx)
{
	struct linux_binprm *program = (void *)ctx->args[2];

	/* The dynamic linker too is mapped now: it was looked at with the program that names it. */
	return held_stop(BPF_CORE_READ(program, file));
}

/* As BTF tracepoints they would take 30 ns less, but the loader a copy of the kernel's BTF. */
static __noinline int held_mmap(struct bpf_raw_tracepoint_args *ctx)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct pt_regs *regs = (void *)ctx->args[0];
	struct file **files, *file = NULL;
	__u32 number;

	if (BPF_CORE_READ(regs, orig_ax) != SYS_MMAP || !(BPF_CORE_READ(regs, dx) & PROT_EXEC) ||
	    BPF_CORE_READ(regs, r10) & MAP_ANONYMOUS || (__s64)ctx->args[1] < 0)
		return 0;
	number = BPF_CORE_READ(regs, r8);
	if (number >= BPF_CORE_READ(task, files, fdt, max_fds))
		return 0;
	files = BPF_CORE_READ(task, files, fdt, fd);
	bpf_probe_read_kernel(&file, sizeof(file), files + number);
	return held_stop(file);
}

/*
 * All system calls come through the last two: they are attached only until what is held has
 * started, and anew when it calls exec. From about 7.0 on the kernel skips one that is
 * running on that CPU already, for a task that was preempted in it; where nothing may be
 * missed, the next one then does it.
 */
SEC("raw_tp/sched_process_exec")
int unwind_exec(struct bpf_raw_tracepoint_args *ctx)
{
	return held_exec(ctx);
}

SEC("?raw_tp/sched_process_exec")
int held_exec_too(struct bpf_raw_tracepoint_args *ctx)
{
	return held_exec(ctx);
}

SEC("?raw_tp/sched_process_exec")
int held_exec_again(struct bpf_raw_tracepoint_args *ctx)
{
	return held_exec(ctx);
}

SEC("raw_tp/sys_exit")
int unwind_mmap(struct bpf_raw_tracepoint_args *ctx)
{
	return held_mmap(ctx);
}

SEC("?raw_tp/sys_exit")
int held_mmap_too(struct bpf_raw_tracepoint_args *ctx)
{
	return held_mmap(ctx);
}

#endif /* MEMTOOLS_HELD_BPF_H */
