// SPDX-License-Identifier: BSD-2-Clause
/*
 * mmapsnoop: every mmap(2), with its file and its result; munmap(2) and
 * mremap(2) where asked for.
 *
 * Hooks: the system calls' tracepoints. At entry the arguments and the file are
 * remembered by thread; at exit all goes to user space as one event. The file
 * comes from the table of descriptors at that moment, so it does not matter
 * when and by whom it was opened.
 */
#include "event.bpf.h"
#include "file.bpf.h"
#include "filter.bpf.h"
#include "task_stack.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define MAP_ANONYMOUS 0x20
#define MAX_ERRNO     4095

enum call_kind {
	CALL_MMAP,
	CALL_MUNMAP,
	CALL_MREMAP,
};

/* What follows an event in its record. */
enum file_kind {
	FILE_NONE,
	FILE_NAME,		/* the file's name */
	FILE_PATH,		/* its name and those of its folders up to the root */
	FILE_PATH_CUT,		/* the same, but folders at the root's end are missing */
	FILE_PATH_IN_NO_FOLDER, /* the name of what is in no folder */
};

struct event {
	__u64 time_ns; /* CLOCK_MONOTONIC, at exit */
	__u64 args[6]; /* the system call's, in its order */
	__u64 stack;   /* of the caller, an id in `stacks`; 0: lost */
	__s64 result;  /* address, 0, or -errno */
	__u32 pid;
	__u32 tid;
	enum call_kind kind;
	enum file_kind file;
	__u32 file_bytes; /* of what follows */
	__u32 reserved;
	char comm[COMM_BYTES];
};
struct event *unused_event __attribute__((unused));

struct event_with_name {
	struct event event;
	char name[FILE_NAME_BYTES];
};

struct event_with_path {
	struct event event;
	char names[FILE_PATH_BYTES];
};

/* A call that some thread is in. */
struct call {
	__u64 args[6];
	struct file *file;
	struct task_ids ids;
	enum call_kind kind;
};

/* Options, set before load. */
const volatile __u8 failed_only;
const volatile __u8 full_path;
const volatile __u8 with_stack;

/* By thread: pid_tgid as bpf_get_current_pid_tgid() returns it. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 32768);
	__type(key, __u64);
	__type(value, struct call);
} calls SEC(".maps");

static __always_inline void begin(struct call *call)
{
	__u64 thread = bpf_get_current_pid_tgid();

	if (bpf_map_update_elem(&calls, &thread, call, BPF_ANY))
		count_loss(calls);
}

static __always_inline void fill(struct event *event, const struct call *call, long result,
				 __u64 stack)
{
	event->time_ns = bpf_ktime_get_ns();
	__builtin_memcpy(event->args, call->args, sizeof(event->args));
	event->stack = stack;
	event->result = result;
	event->pid = call->ids.pid;
	event->tid = call->ids.tid;
	event->kind = call->kind;
	event->file = FILE_NONE;
	event->file_bytes = 0;
	bpf_get_current_comm(event->comm, sizeof(event->comm));
}

static __noinline int emit(const struct call *call, long result, __u64 stack)
{
	struct event *event = event_reserve(sizeof(*event));

	if (event) {
		fill(event, call, result, stack);
		bpf_ringbuf_submit(event, 0);
	}
	return 0;
}

static __noinline int emit_with_name(const struct call *call, long result, __u64 stack)
{
	struct event_with_name *record = event_reserve(sizeof(*record));

	if (!record)
		return 0;
	fill(&record->event, call, result, stack);
	record->event.file = FILE_NAME;
	record->event.file_bytes = file_name(call->file, record->name);
	bpf_ringbuf_submit(record, 0);
	return 0;
}

static __noinline int emit_with_path(const struct call *call, long result, __u64 stack)
{
	struct event_with_path *record = event_reserve(sizeof(*record));
	__u32 complete;

	if (!record)
		return 0;
	fill(&record->event, call, result, stack);
	record->event.file_bytes = file_path(call->file, record->names, &complete);
	record->event.file = complete == 1   ? FILE_PATH
			     : complete == 2 ? FILE_PATH_IN_NO_FOLDER
					     : FILE_PATH_CUT;
	bpf_ringbuf_submit(record, 0);
	return 0;
}

static __always_inline int end(long result)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct call *call = bpf_map_lookup_elem(&calls, &thread);

	if (!call)
		return 0;
	if (!failed_only || (unsigned long)result >= (unsigned long)-MAX_ERRNO) {
		__u64 stack = with_stack ? stack_of_task() : STACK_NONE;

		if (!call->file)
			emit(call, result, stack);
		else if (full_path)
			emit_with_path(call, result, stack);
		else
			emit_with_name(call, result, stack);
	}
	bpf_map_delete_elem(&calls, &thread);
	return 0;
}

SEC("tracepoint/syscalls/sys_enter_mmap")
int mmap_enter(struct syscall_trace_enter *ctx)
{
	struct call call = { .kind = CALL_MMAP };

	if (!filter_wants(&call.ids))
		return 0;
	call.args[0] = ctx->args[0];
	call.args[1] = ctx->args[1];
	call.args[2] = ctx->args[2];
	call.args[3] = ctx->args[3];
	call.args[4] = ctx->args[4];
	call.args[5] = ctx->args[5];
	/* The kernel does not look at the descriptor of an anonymous mapping either. */
	if (!(call.args[3] & MAP_ANONYMOUS))
		call.file = file_of_fd(call.args[4]);
	begin(&call);
	return 0;
}

SEC("tracepoint/syscalls/sys_exit_mmap")
int mmap_exit(struct syscall_trace_exit *ctx)
{
	return end(ctx->ret);
}

SEC("tracepoint/syscalls/sys_enter_munmap")
int munmap_enter(struct syscall_trace_enter *ctx)
{
	struct call call = { .kind = CALL_MUNMAP };

	if (!filter_wants(&call.ids))
		return 0;
	call.args[0] = ctx->args[0];
	call.args[1] = ctx->args[1];
	begin(&call);
	return 0;
}

SEC("tracepoint/syscalls/sys_exit_munmap")
int munmap_exit(struct syscall_trace_exit *ctx)
{
	return end(ctx->ret);
}

SEC("tracepoint/syscalls/sys_enter_mremap")
int mremap_enter(struct syscall_trace_enter *ctx)
{
	struct call call = { .kind = CALL_MREMAP };

	if (!filter_wants(&call.ids))
		return 0;
	call.args[0] = ctx->args[0];
	call.args[1] = ctx->args[1];
	call.args[2] = ctx->args[2];
	call.args[3] = ctx->args[3];
	call.args[4] = ctx->args[4];
	begin(&call);
	return 0;
}

SEC("tracepoint/syscalls/sys_exit_mremap")
int mremap_exit(struct syscall_trace_exit *ctx)
{
	return end(ctx->ret);
}

/* A thread that is killed inside a call never gets to its exit. */
SEC("raw_tp/sched_process_exit")
int thread_exit(void *ctx)
{
	__u64 thread = bpf_get_current_pid_tgid();

	bpf_map_delete_elem(&calls, &thread);
	return 0;
}
