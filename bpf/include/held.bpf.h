/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Stops a command that the tool starts, by a signal, whenever it maps code, until user space
 * (src/stacks/unwind/held.rs) has looked at the mapped file and lets the command continue. So even
 * its first stacks are complete, and allocators that it loads are probed before their first call.
 * On request its descendants are stopped, too, once for each file.
 */
#ifndef MEMTOOLS_HELD_BPF_H
#define MEMTOOLS_HELD_BPF_H

#include "arch_system_call.bpf.h"
#include "filter.bpf.h"
#include "unwind.bpf.h"

#define HELD_AT_A_TIME	  256
#define SIGSTOP		  19
#define PROT_EXEC	  4
#define MAP_ANONYMOUS	  0x20
#define SIGNAL_UNKILLABLE 0x40

enum unwind_held_key {
	HELD_PROCESS,	  /* the command's PID, 0: nothing is held */
	HELD_DESCENDANTS, /* 1: its descendants, too */
	HELD_GROUP,	  /* the address of the process group in which the command began */
	HELD_KEYS,
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, HELD_KEYS);
	__type(key, __u32);
	__type(value, __u64);
} unwind_held SEC(".maps");

/*
 * Hash of the file that a process is stopped for, by PID, until the process continues; 0 just
 * before the stop.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, HELD_AT_A_TIME);
	__type(key, __u32);
	__type(value, __u64);
} unwind_stopped SEC(".maps");

/* Files, by hash, that user space has looked at while a process was stopped for them. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1); /* enlarged where descendants are held */
	__type(key, __u64);
	__type(value, __u8);
} unwind_looked SEC(".maps");

static __always_inline __u64 held_value(__u32 key)
{
	__u64 *value = bpf_map_lookup_elem(&unwind_held, &key);

	return value ? *value : 0;
}

/*
 * Whether the current process is to be stopped: the command itself, which is a child of the tool,
 * or a descendant of it. The stop of a descendant sends SIGCHLD to its parent, which only matters
 * to a parent that asks for stops. So a shell's job, which is a process group of its own, is left
 * alone: the shell would report the stop, and the kernel would end the job (SIGHUP) if its group
 * were orphaned meanwhile. Also left alone are processes that a debugger traces, and the init of a
 * namespace, which ignores the signal.
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
 * Stops the current process, which has mapped this file, unless user space has looked at the file
 * already. The process is stopped only if the request that makes user space continue it can be
 * sent.
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
		return 0; /* already stopped by another program on the same hook */
	if (!stopped && bpf_map_update_elem(&unwind_stopped, &pid, &about, BPF_NOEXIST))
		return 0;
	request = bpf_ringbuf_reserve(&unwind_requests, sizeof(*request), 0);
	if (!request) {
		if (!stopped)
			bpf_map_delete_elem(&unwind_stopped, &pid);
		return 0;
	}
	/*
	 * The signal is sent before the hash is stored: whoever reads the hash can undo the signal
	 * by SIGCONT.
	 */
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

	/*
	 * exec maps the dynamic linker, too: user space looks at it with the program that names it.
	 */
	return held_stop(BPF_CORE_READ(program, file));
}

/*
 * Stops the current process if the system call that returns is an mmap() of a file's code. As BTF
 * tracepoints these programs would take 30 ns less, but the loader would need a copy of the
 * kernel's BTF.
 */
static __noinline int held_mmap(struct bpf_raw_tracepoint_args *ctx)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct pt_regs *regs = (void *)ctx->args[0];
	struct file **files, *file = NULL;
	__u32 number;

	if (system_call_number(regs) != SYSTEM_CALL_MMAP ||
	    !(PT_REGS_PARM3_CORE_SYSCALL(regs) & PROT_EXEC) ||
	    PT_REGS_PARM4_CORE_SYSCALL(regs) & MAP_ANONYMOUS || (__s64)ctx->args[1] < 0)
		return 0;
	number = PT_REGS_PARM5_CORE_SYSCALL(regs);
	if (number >= BPF_CORE_READ(task, files, fdt, max_fds))
		return 0;
	files = BPF_CORE_READ(task, files, fdt, fd);
	bpf_probe_read_kernel(&file, sizeof(file), files + number);
	return held_stop(file);
}

/*
 * The last two programs run at every system call of the machine: they are attached only until the
 * held command has started, and again when it calls exec. From about 7.0 on the kernel skips a
 * program that is running on the same CPU already, for a task that was preempted in it. Where no
 * event may be missed, the next program on the hook then does the work.
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
