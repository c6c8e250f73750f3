// SPDX-License-Identifier: BSD-2-Clause
/*
 * brkstack: calls of brk(2), by user stack and process.
 *
 * Hooks: the tracepoints syscalls:sys_enter_brk and, if the result matters,
 * sys_exit_brk. Their programs are told no kernel stack on 5.10 and 6.1; for these
 * the raw tracepoints sys_enter and sys_exit, which cost every other system call
 * 0.1 us as well.
 */
#include "event.bpf.h"
#include "filter.bpf.h"
#include "stack_count.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* A call, for --events. */
struct event {
	__u64 time_ns;	 /* CLOCK_MONOTONIC */
	__u64 requested; /* where the heap was to end; 0: only asked */
	__u64 old_end;
	__u64 new_end;
	__u32 pid;
	__u32 tid;
	char comm[16];
};
struct event *unused_event __attribute__((unused));

/* A call that some thread is in. */
struct call {
	__u64 requested;
	__u64 old_end;
};

/* Options, set before load. */
const volatile __u8 with_result; /* calls are recorded when they return */
const volatile __u8 growth_only;
const volatile __u8 each_call;
const volatile __u32 brk_number; /* of the system call */

/* By thread: pid_tgid as bpf_get_current_pid_tgid() returns it. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, __u64);
	__type(value, struct call);
} calls SEC(".maps");

static __always_inline int begins(void *ctx, __u64 requested)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	__u64 thread = bpf_get_current_pid_tgid();
	struct task_ids ids;
	struct call call;

	if (!filter_wants(&ids))
		return 0;
	if (!with_result)
		return count_stacks(ctx, 0, ids.pid, 0);
	call.requested = requested;
	call.old_end = BPF_CORE_READ(task, mm, brk);
	if (bpf_map_update_elem(&calls, &thread, &call, BPF_ANY))
		count_loss(calls);
	return 0;
}

static __noinline int emit(const struct call *call, __u64 new_end, __u32 pid, __u32 tid)
{
	struct event *event = event_reserve(sizeof(*event));

	if (!event)
		return 0;
	event->time_ns = bpf_ktime_get_ns();
	event->requested = call->requested;
	event->old_end = call->old_end;
	event->new_end = new_end;
	event->pid = pid;
	event->tid = tid;
	bpf_get_current_comm(event->comm, sizeof(event->comm));
	bpf_ringbuf_submit(event, 0);
	return 0;
}

/* brk(2) of the kernel returns where the heap ends then, whether it did what it was asked or not.
 */
static __always_inline int ends(void *ctx, __u64 new_end)
{
	__u64 thread = bpf_get_current_pid_tgid(), growth;
	struct call *found = bpf_map_lookup_elem(&calls, &thread);
	struct task_ids ids;
	struct call call;

	if (!found)
		return 0;
	call = *found;
	bpf_map_delete_elem(&calls, &thread);
	growth = new_end > call.old_end ? new_end - call.old_end : 0;
	if (growth_only && !growth)
		return 0;
	ids = ids_of_current();
	if (each_call)
		return emit(&call, new_end, ids.pid, ids.tid);
	return count_stacks(ctx, 0, ids.pid, growth);
}

SEC("?tracepoint/syscalls/sys_enter_brk")
int brk_enter(struct trace_event_raw_sys_enter *ctx)
{
	return begins(ctx, ctx->args[0]);
}

SEC("?tracepoint/syscalls/sys_exit_brk")
int brk_exit(struct trace_event_raw_sys_exit *ctx)
{
	return ends(ctx, ctx->ret);
}

#define TS_COMPAT 0x2 /* the system call is a 32-bit one, which has another number */

static __always_inline bool is_brk(__u64 number)
{
	struct task_struct *task = (void *)bpf_get_current_task();

	return number == brk_number && !(BPF_CORE_READ(task, thread_info.status) & TS_COMPAT);
}

SEC("?raw_tp/sys_enter")
int any_enter(struct bpf_raw_tracepoint_args *ctx)
{
	struct pt_regs *regs = (void *)ctx->args[0];

	return is_brk(ctx->args[1]) ? begins(ctx, PT_REGS_PARM1_CORE_SYSCALL(regs)) : 0;
}

SEC("?raw_tp/sys_exit")
int any_exit(struct bpf_raw_tracepoint_args *ctx)
{
	struct pt_regs *regs = (void *)ctx->args[0];

	return is_brk(BPF_CORE_READ(regs, orig_ax)) ? ends(ctx, ctx->args[1]) : 0;
}
