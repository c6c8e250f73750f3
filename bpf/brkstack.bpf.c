// SPDX-License-Identifier: BSD-2-Clause
/*
 * brkstack: calls of brk(2), by user stack and process.
 *
 * Hooks: the tracepoints syscalls:sys_enter_brk and, if the result matters, sys_exit_brk. Before
 * 6.12 their programs get no kernel stack (376bd59e2a04); for kernel stacks these kernels get the
 * raw tracepoints sys_enter and sys_exit, which cost every other system call 0.1 us as well. From
 * 7.2 on a task can be preempted in a program on any of these, and the program is skipped for all
 * other tasks on that CPU meanwhile: these kernels get kprobes of the system call's function
 * (src/bpf/attach.rs).
 */
#include "arch_system_call.bpf.h"
#include "cgroup_path.bpf.h"
#include "event.bpf.h"
#include "filter.bpf.h"
#include "stack_count.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Event of a call, for --events. */
struct event {
	__u64 time_ns;	 /* CLOCK_MONOTONIC */
	__u64 requested; /* where the heap was to end; 0: a query */
	__u64 old_end;
	__u64 new_end;
	__u64 user_stack; /* ids in `stacks`; STACK_NONE also if not requested */
	__u64 kernel_stack;
	__u64 cgroup; /* id, as cgroup_of_current() returns it */
	__u32 pid;
	__u32 tid;
	char comm[16];
};
EXPORT_TYPE(struct event);

/* Call that a thread is in. */
struct call {
	__u64 requested;
	__u64 old_end;
};

/* Options, set before load. */
const volatile __u8 with_result; /* calls are recorded when they return */
const volatile __u8 growth_only;
const volatile __u8 each_call;
const volatile __u32 brk_number; /* of the system call */

BY_THREAD(calls, struct call);

static __always_inline int begins(void *ctx, __u64 interrupted, __u64 requested)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	__u64 thread = bpf_get_current_pid_tgid();
	struct task_ids ids;
	struct call call;

	if (!filter_wants(&ids))
		return 0;
	if (!with_result)
		return count_stacks(ctx, interrupted, ids.pid, 0);
	call.requested = requested;
	call.old_end = BPF_CORE_READ(task, mm, brk);
	begin_call(&calls, thread, &call);
	return 0;
}

static __noinline int emit(const struct call *call, __u64 new_end, __u64 user, __u64 kernel)
{
	struct event *event = event_reserve(sizeof(*event));
	struct task_ids ids;

	if (!event)
		return 0;
	ids = ids_of_current();
	event->time_ns = bpf_ktime_get_ns();
	event->requested = call->requested;
	event->old_end = call->old_end;
	event->new_end = new_end;
	event->user_stack = user;
	event->kernel_stack = kernel;
	event->cgroup = cgroup_of_current();
	event->pid = ids.pid;
	event->tid = ids.tid;
	bpf_get_current_comm(event->comm, sizeof(event->comm));
	bpf_ringbuf_submit(event, 0);
	return 0;
}

/*
 * Handles the end of a call. The kernel's brk(2) returns the end of the heap, whether it was moved
 * as asked or not.
 */
static __always_inline int ends(void *ctx, __u64 new_end)
{
	__u64 thread = bpf_get_current_pid_tgid(), growth;
	struct call *found = bpf_map_lookup_elem(&calls, &thread);
	__u64 user, kernel;
	struct call call;

	if (!found)
		return 0;
	call = *found;
	bpf_map_delete_elem(&calls, &thread);
	growth = new_end > call.old_end ? new_end - call.old_end : 0;
	if (growth_only && !growth)
		return 0;
	if (!each_call)
		return count_stacks(ctx, 0, ids_of_current().pid, growth);
	kernel = with_kernel_stacks ? stack_of_kernel(ctx) : STACK_NONE;
	user = with_user_stacks ? stack_of_task() : STACK_NONE;
	return emit(&call, new_end, user, kernel);
}

SEC("?tracepoint/syscalls/sys_enter_brk")
int brk_enter(struct trace_event_raw_sys_enter *ctx)
{
	return begins(ctx, 0, ctx->args[0]);
}

SEC("?tracepoint/syscalls/sys_exit_brk")
int brk_exit(struct trace_event_raw_sys_exit *ctx)
{
	return ends(ctx, ctx->ret);
}

SEC("?kprobe/" SYSTEM_CALL "brk")
int brk_enter_function(struct pt_regs *ctx)
{
	struct pt_regs *regs = PT_REGS_SYSCALL_REGS(ctx);

	return begins(ctx, 1, PT_REGS_PARM1_CORE_SYSCALL(regs));
}

SEC("?kretprobe/" SYSTEM_CALL "brk")
int brk_exit_function(struct pt_regs *ctx)
{
	return ends(ctx, PT_REGS_RC(ctx));
}

SEC("?raw_tp/sched_process_exit")
int thread_exit(void *ctx)
{
	lose_call(&calls);
	return 0;
}

static __always_inline bool is_brk(__u64 number)
{
	return number == brk_number && !in_compat_call();
}

SEC("?raw_tp/sys_enter")
int any_enter(struct bpf_raw_tracepoint_args *ctx)
{
	struct pt_regs *regs = (void *)ctx->args[0];

	return is_brk(ctx->args[1]) ? begins(ctx, 0, PT_REGS_PARM1_CORE_SYSCALL(regs)) : 0;
}

SEC("?raw_tp/sys_exit")
int any_exit(struct bpf_raw_tracepoint_args *ctx)
{
	struct pt_regs *regs = (void *)ctx->args[0];

	return is_brk(system_call_number(regs)) ? ends(ctx, ctx->args[1]) : 0;
}
