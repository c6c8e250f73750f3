// SPDX-License-Identifier: BSD-2-Clause
/*
 * mmapsnoop: every mmap(2), with its file and its result; munmap(2) and
 * mremap(2) where requested.
 *
 * Hooks: the tracepoints of the system calls' exits. The arguments are still available there, in
 * the registers with which the task entered the kernel: nothing has to be stored at the entry,
 * which would double the cost. The file comes from the table of descriptors at that moment, so it
 * does not matter when and by whom the file was opened. From 7.2 on a task can be preempted in a
 * program on these tracepoints, and the program is skipped for all other tasks on that CPU
 * meanwhile: these kernels get kretprobes of the system calls' functions (src/bpf/attach.rs).
 *
 * The calls of 32-bit programs do not hit these tracepoints (ARCH_TRACE_IGNORE_COMPAT_SYSCALLS);
 * the tracepoint of all system calls sees them, at a cost for every system call.
 */
#include "cgroup_path.bpf.h"
#include "event.bpf.h"
#include "file.bpf.h"
#include "filter.bpf.h"
#include "arch_system_call.bpf.h"
#include "task_stack.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define MAP_ANONYMOUS 0x20
#define MAX_ERRNO     4095

enum call_kind {
	CALL_MMAP,
	CALL_MUNMAP,
	CALL_MREMAP,
};

/* Kind of the data that follows an event in its record. */
enum file_kind {
	FILE_NONE,
	FILE_NAME,		/* the file's name */
	FILE_PATH,		/* its name and those of its folders up to the root */
	FILE_PATH_CUT,		/* as FILE_PATH, but folders at the root's end are missing */
	FILE_PATH_IN_NO_FOLDER, /* the name of a file that is in no folder */
};

struct event {
	__u64 time_ns; /* CLOCK_MONOTONIC, at exit */
	__u64 args[6]; /* the system call's, in its order */
	__u64 stack;   /* of the caller, an id in `stacks`; 0: lost */
	__u64 cgroup;  /* the task's, as cgroup_of_current() returns it */
	__s64 result;  /* address, 0, or -errno */
	__u32 pid;
	__u32 tid;
	enum call_kind kind;
	enum file_kind file;
	__u32 file_bytes; /* of the data that follows */
	__u32 reserved;
	char comm[COMM_BYTES];
};
EXPORT_TYPE(struct event);

struct event_with_name {
	struct event event;
	char name[FILE_NAME_BYTES];
};

struct event_with_path {
	struct event event;
	char names[FILE_PATH_BYTES];
};

/* Call that has returned. */
struct call {
	__u64 args[6];
	__s64 result;
	__u64 stack; /* as in event */
	__u64 cgroup;
	struct file *file;
	struct task_ids ids;
	enum call_kind kind;
};

/* Options, set before load. */
const volatile __u8 failed_only;
const volatile __u8 full_path;
const volatile __u8 with_munmap;
const volatile __u8 with_stack;

static __always_inline void fill(struct event *event, const struct call *call)
{
	event->time_ns = bpf_ktime_get_ns();
	__builtin_memcpy(event->args, call->args, sizeof(event->args));
	event->stack = call->stack;
	event->cgroup = call->cgroup;
	event->result = call->result;
	event->pid = call->ids.pid;
	event->tid = call->ids.tid;
	event->kind = call->kind;
	event->file = FILE_NONE;
	event->file_bytes = 0;
	bpf_get_current_comm(event->comm, sizeof(event->comm));
}

static __noinline int emit(const struct call *call)
{
	struct event *event = event_reserve(sizeof(*event));

	if (event) {
		fill(event, call);
		bpf_ringbuf_submit(event, 0);
	}
	return 0;
}

static __noinline int emit_with_name(const struct call *call)
{
	struct event_with_name *record = event_reserve(sizeof(*record));

	if (!record)
		return 0;
	fill(&record->event, call);
	record->event.file = FILE_NAME;
	record->event.file_bytes = file_name(call->file, record->name);
	bpf_ringbuf_submit(record, 0);
	return 0;
}

static __noinline int emit_with_path(const struct call *call)
{
	struct event_with_path *record = event_reserve(sizeof(*record));
	__u32 complete;

	if (!record)
		return 0;
	fill(&record->event, call);
	record->event.file_bytes = file_path(call->file, record->names, &complete);
	record->event.file = complete == 1   ? FILE_PATH
			     : complete == 2 ? FILE_PATH_IN_NO_FOLDER
					     : FILE_PATH_CUT;
	bpf_ringbuf_submit(record, 0);
	return 0;
}

/* Whether the options match the call. Sets its `ids`. */
static __always_inline bool wanted(struct call *call)
{
	if (failed_only && (__u64)call->result < (__u64)-MAX_ERRNO)
		return false;
	return filter_wants(&call->ids);
}

/* Sends the event of a call whose arguments are set. */
static __always_inline int returned(struct call *call)
{
	if (with_stack)
		call->stack = stack_of_task();
	call->cgroup = cgroup_of_current();
	/* The kernel ignores the descriptor of an anonymous mapping, too. */
	if (call->kind == CALL_MMAP && !(call->args[3] & MAP_ANONYMOUS))
		call->file = file_of_fd(call->args[4]);
	if (!call->file)
		return emit(call);
	return full_path ? emit_with_path(call) : emit_with_name(call);
}

static __always_inline int native(enum call_kind kind, long result)
{
	struct call call = { .kind = kind, .result = result };

	if (!wanted(&call))
		return 0;
	read_system_call_arguments(call.args);
	return returned(&call);
}

SEC("tracepoint/syscalls/sys_exit_mmap")
int mmap_exit(struct syscall_trace_exit *ctx)
{
	return native(CALL_MMAP, ctx->ret);
}

SEC("tracepoint/syscalls/sys_exit_munmap")
int munmap_exit(struct syscall_trace_exit *ctx)
{
	return native(CALL_MUNMAP, ctx->ret);
}

SEC("tracepoint/syscalls/sys_exit_mremap")
int mremap_exit(struct syscall_trace_exit *ctx)
{
	return native(CALL_MREMAP, ctx->ret);
}

#define RETURNS(name, kind)                                                                        \
	SEC("?kretprobe/" SYSTEM_CALL #name)                                                       \
	int name##_exit_function(struct pt_regs *ctx)                                              \
	{                                                                                          \
		return native(kind, PT_REGS_RC(ctx));                                              \
	}

RETURNS(mmap, CALL_MMAP)
RETURNS(munmap, CALL_MUNMAP)
RETURNS(mremap, CALL_MREMAP)

SEC("raw_tp/sys_exit")
int compat_exit(struct bpf_raw_tracepoint_args *ctx)
{
	struct pt_regs *regs = (struct pt_regs *)ctx->args[0];
	struct call call = { .kind = CALL_MMAP, .result = ctx->args[1] };
	__u64 number;

	if (!in_compat_call())
		return 0;
	number = system_call_number(regs);
	if (number == COMPAT_MUNMAP && with_munmap)
		call.kind = CALL_MUNMAP;
	else if (number == COMPAT_MREMAP && with_munmap)
		call.kind = CALL_MREMAP;
	else if (number != COMPAT_MMAP && number != COMPAT_MMAP2)
		return 0;
	if (!wanted(&call))
		return 0;
	read_compat_arguments(call.args, regs, number);
	return returned(&call);
}
