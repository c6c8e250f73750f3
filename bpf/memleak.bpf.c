// SPDX-License-Identifier: BSD-2-Clause
/*
 * memleak: memory that processes allocated and did not free, by call stack.
 *
 * Hooks: uprobes on the target's functions that allocate and map (entry and
 * return) and that free (entry), and on copies of CPython's allocator in other
 * functions; sched_process_fork, sched_process_exec, sched_process_exit, and with --cgroup
 * cgroup_attach_task.
 *
 * Live blocks are in the maps of memleak/live.bpf.h. Mappings (mmap, munmap, mremap)
 * can be unmapped in part, which takes an ordered map: they go to user space as
 * events, in order, and are kept there.
 *
 * The handlers are attached in one of four ways, from the best down, which
 * tools/memleak/processes/probes.rs chooses: one uprobe session link for all functions of a file,
 * with their signatures in its cookies (6.13 and later); two links for each file, one for entries
 * and one for returns, also with cookies (6.6); a perf uprobe for each entry and return, with
 * cookies (5.15); perf uprobes without cookies, with a program for each signature, entry_0 to
 * entry_59, and all blocks in hash maps.
 */

#include "memleak/calls.bpf.h"
#include "memleak/slots.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/*
 * Whether a session program runs at the function's return. At the entry the instruction pointer is
 * at the probe. No function returns to the probe, as no call precedes it. bpf_session_is_return()
 * would tell, too, but looking it up takes all of the kernel's BTF, 5 ms of the start.
 */
static __always_inline bool is_return(struct pt_regs *ctx)
{
	return bpf_get_func_ip(ctx) != PT_REGS_IP(ctx);
}

SEC("uprobe.session")
int session_call(struct pt_regs *ctx)
{
	__u64 start = timing_start();
	int result = 0;

	if (is_return(ctx))
		leave(ctx, true);
	else
		result = !enter(ctx, bpf_get_attach_cookie(ctx), true);
	timing_end(start);
	return result;
}

/*
 * Calls of a function of memleak's own, made by a thread other than the first. The count shows
 * whether links for one process see all of its threads.
 */
__u64 trial_calls;

SEC("uprobe.multi")
int trial(struct pt_regs *ctx)
{
	__sync_fetch_and_add(&trial_calls, 1);
	return 0;
}

/*
 * Handles an entry with a cookie: as a uprobe with a link for each probe, and as uprobe.multi with
 * one link for all.
 */
SEC("uprobe")
int cookie_entry(struct pt_regs *ctx)
{
	__u64 start = timing_start();

	enter(ctx, bpf_get_attach_cookie(ctx), true);
	timing_end(start);
	return 0;
}

/* Handles a copy of CPython's allocator. */
SEC("uprobe")
int cookie_slot(struct pt_regs *ctx)
{
	__u64 start = timing_start();

	move_slot(ctx, bpf_get_attach_cookie(ctx), true);
	timing_end(start);
	return 0;
}

SEC("uretprobe")
int cookie_return(struct pt_regs *ctx)
{
	__u64 start = timing_start();

	leave(ctx, true);
	timing_end(start);
	return 0;
}

/*
 * Signature of the call that begins on each CPU, for kernels without cookies. A program for each
 * signature writes it, and goes on to the program that does the work. The programs for signatures
 * are a few instructions each: verifying the working program sixteen times was most of the start.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64); /* the signature, and below it the thread whose call has it */
} plain_calls SEC(".maps");

/* Program array for the tail calls: holds plain_entry and plain_slot. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, __u32);
} plain_work SEC(".maps");

/*
 * Returns the signature of the call that the current thread has begun, or 0, which is no signature,
 * if that is not known. Kernels without cookies run the two programs below on the CPU on which the
 * call began, before any other call there. On other kernels, which use the programs only if cookies
 * fail, another thread can come in between: the call is lost then.
 */
static __noinline __u32 begun_call(void)
{
	__u32 zero = 0, thread = bpf_get_current_pid_tgid();
	volatile __u64 *call = bpf_map_lookup_elem(&plain_calls, &zero);
	__u64 begun = call ? *call : 0;

	if ((__u32)begun == thread)
		return begun >> 32;
	count_loss(calls);
	return 0;
}

SEC("uprobe")
int plain_entry(struct pt_regs *ctx)
{
	__u64 start = timing_start();
	__u32 signature = begun_call();

	if (signature)
		enter(ctx, signature, false);
	timing_end(start);
	return 0;
}

SEC("uprobe")
int plain_slot(struct pt_regs *ctx)
{
	__u64 start = timing_start();
	__u32 signature = begun_call();

	if (signature)
		move_slot(ctx, signature, false);
	timing_end(start);
	return 0;
}

static __always_inline int enter_plain(struct pt_regs *ctx, __u32 signature)
{
	__u32 zero = 0, thread = bpf_get_current_pid_tgid();
	volatile __u64 *call = bpf_map_lookup_elem(&plain_calls, &zero);

	if (call) {
		*call = (__u64)signature << 32 | thread;
		bpf_tail_call(ctx, &plain_work,
			      field(signature, SIGNATURE_KIND) >= FUNCTION_TAKE_SLOT);
	}
	count_loss(calls);
	return 0;
}

#define ENTRY(number)                                                                              \
	SEC("uprobe")                                                                              \
	int entry_##number(struct pt_regs *ctx)                                                    \
	{                                                                                          \
		return enter_plain(ctx, signatures[number]);                                       \
	}

#define ENTRIES(tens)                                                                              \
	ENTRY(tens##0)                                                                             \
	ENTRY(tens##1)                                                                             \
	ENTRY(tens##2)                                                                             \
	ENTRY(tens##3)                                                                             \
	ENTRY(tens##4)                                                                             \
	ENTRY(tens##5)                                                                             \
	ENTRY(tens##6)                                                                             \
	ENTRY(tens##7)                                                                             \
	ENTRY(tens##8)                                                                             \
	ENTRY(tens##9)

ENTRIES()
ENTRIES(1)
ENTRIES(2)
ENTRIES(3)
ENTRIES(4)
ENTRIES(5)

SEC("uretprobe")
int any_return(struct pt_regs *ctx)
{
	__u64 start = timing_start();

	leave(ctx, false);
	timing_end(start);
	return 0;
}

static __always_inline void forget_call(void)
{
	__u64 thread = bpf_get_current_pid_tgid();

	bpf_map_delete_elem(&threads, &thread);
}

/*
 * Notes when a child begins to share the memory of a traced parent. A child of vfork() that is not
 * traced can allocate and free what its parent then frees or allocates.
 */
SEC("raw_tp/sched_process_fork")
int process_shares(struct bpf_raw_tracepoint_args *ctx)
{
	struct task_struct *parent = (void *)ctx->args[0], *child = (void *)ctx->args[1];
	struct task_ids ids;

	if (BPF_CORE_READ(child, mm) == BPF_CORE_READ(parent, mm) &&
	    BPF_CORE_READ(child, signal) != BPF_CORE_READ(parent, signal) && filter_wants(&ids))
		unseen_call_ns = bpf_ktime_get_ns();
	return 0;
}

SEC("raw_tp/sched_process_exec")
int process_exec(void *ctx)
{
	struct task_ids ids;

	forget_call();
	if (filter_wants(&ids)) {
		peak.outstanding = 0;
		emit(EVENT_EXEC, 0, execs_of_current(), 0);
	}
	return 0;
}

/*
 * Reports a process that was moved to another cgroup, whoever moved it: it may be in the selected
 * cgroup now, with an allocator that is not probed yet.
 */
SEC("raw_tp/cgroup_attach_task")
int process_moved(struct bpf_raw_tracepoint_args *ctx)
{
	struct task_struct *task = (void *)ctx->args[2];
	struct event *event = event_reserve(sizeof(*event));

	unseen_call_ns = bpf_ktime_get_ns();
	if (!event)
		return 0;
	__builtin_memset(event, 0, sizeof(*event));
	event->kind = EVENT_MOVED;
	event->pid = ids_of(task).pid;
	bpf_ringbuf_submit(event, 0);
	return 0;
}

/*
 * Forgets the call that an ending thread is in, so that the next thread with its id does not
 * inherit it.
 */
SEC("raw_tp/sched_process_exit")
int thread_exit(void *ctx)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task();
	struct task_ids ids;

	forget_call();
	if (filter_wants(&ids) && !BPF_CORE_READ(task, signal, live.counter))
		emit(EVENT_EXIT, 0, 0, 0);
	return 0;
}
