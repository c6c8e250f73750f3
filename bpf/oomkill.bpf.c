// SPDX-License-Identifier: BSD-2-Clause
/*
 * oomkill: processes that the kernel kills because memory has run out.
 *
 * Hooks: oom_kill_process(), which knows the victim and the reason; by fentry or else by a kprobe.
 * Also the tracepoint mark_victim, as a raw tracepoint, for tasks that are killed along with the
 * victim (memory.oom.group, or tasks that share the victim's memory). Where no function can be
 * hooked, mark_victim is the only hook: it reports each victim, but not the reason.
 *
 * The argument of mark_victim was the pid alone; since 6.9 (72ba14deb40a, which stable kernels
 * have, too) it is the task. User space looks that up in BTF. If the argument is no task, another
 * program takes the pid from the tracepoint's record: the record has the pid on all kernels, so
 * this can be tested on all of them.
 */
#include "cgroup_path.bpf.h"
#include "event.bpf.h"
#include "filter.bpf.h"
#include "kernel_stack.bpf.h"
#include "task_stack.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

enum event_kind {
	EVENT_KILL,   /* oom_kill_process() */
	EVENT_VICTIM, /* mark_victim */
};

enum oom_kind {
	OOM_GLOBAL,
	OOM_MEMCG,  /* a memory cgroup is at its limit */
	OOM_CPUSET, /* the nodes that a cpuset or a memory policy permits are full */
	OOM_SYSRQ,  /* somebody requested the kill by SysRq */
	OOM_UNKNOWN,
};

#define CGROUP_NAME_BYTES 64

struct task {
	__u64 anon_pages;
	__u64 file_pages;
	__u64 shmem_pages;
	__u64 swap_pages;
	__u64 page_table_bytes;
	__u64 total_vm_pages;
	__u64 cgroup; /* id in the version 2 hierarchy, 0: not known */
	__u32 pid;
	__u32 uid;
	__s32 oom_score_adj;
	__u32 known; /* 0: only the pid is known */
	char comm[COMM_BYTES];
};

struct event {
	__u64 time_ns;	    /* CLOCK_MONOTONIC */
	__u64 total_pages;  /* that the task which wanted memory may use */
	__u64 limit_pages;  /* of the cgroup at its limit */
	__u64 limit_cgroup; /* id of that cgroup; 0: none, or of version 1 */
	__u64 kernel_stack; /* of the triggering task */
	__u64 user_stack;
	struct task victim;
	__u32 pid; /* the triggering task */
	__u32 tid;
	__u32 gfp_flags;
	__s32 order;
	enum event_kind event;
	enum oom_kind kind;
	__u32 wanted; /* the options match the task; 0: they may match the victim */
	__u32 reserved;
	char comm[COMM_BYTES];
	char limit_name[CGROUP_NAME_BYTES]; /* the last part of its path */
};
EXPORT_TYPE(struct event);

/* Options, set before load. */
const volatile __u8 want_stacks;
const volatile __u8 only_victims; /* mark_victim is the only hook */

/* Type up to 6.1; later kernels have an array of percpu_counter. */
struct mm_rss_stat___atomic {
	atomic_long_t count[4];
};

struct mm_struct___atomic {
	struct mm_rss_stat___atomic rss_stat;
};

enum mm_counter {
	COUNTER_FILE,
	COUNTER_ANON,
	COUNTER_SWAP,
	COUNTER_SHMEM,
};

/*
 * Returns the number of pages of one kind, without changes that CPUs have not yet added to the
 * counter. For a percpu_counter these are up to 32 pages, or twice the number of CPUs, for each
 * CPU.
 */
static __always_inline __u64 mm_pages(struct mm_struct *mm, enum mm_counter counter)
{
	struct mm_struct___atomic *old = (void *)mm;
	long pages;

	if (bpf_core_field_exists(old->rss_stat.count))
		pages = BPF_CORE_READ(old, rss_stat.count[counter].counter);
	else
		pages = BPF_CORE_READ(mm, rss_stat[counter].count);
	return pages > 0 ? pages : 0;
}

static __noinline int describe(struct task *out, struct task_struct *task)
{
	struct mm_struct *mm = BPF_CORE_READ(task, mm);
	struct task_ids ids = ids_of(task);

	out->pid = ids.pid;
	out->uid = BPF_CORE_READ(task, real_cred, uid.val);
	out->oom_score_adj = BPF_CORE_READ(task, signal, oom_score_adj);
	out->cgroup = cgroup_of(task);
	out->known = 1;
	BPF_CORE_READ_STR_INTO(&out->comm, task, comm);
	/* Other threads can have outlived the first one, whose mm is gone then. */
	if (!mm) {
		out->anon_pages = UNKNOWN;
		out->file_pages = UNKNOWN;
		out->shmem_pages = UNKNOWN;
		out->swap_pages = UNKNOWN;
		out->page_table_bytes = UNKNOWN;
		out->total_vm_pages = UNKNOWN;
		return 0;
	}
	out->anon_pages = mm_pages(mm, COUNTER_ANON);
	out->file_pages = mm_pages(mm, COUNTER_FILE);
	out->shmem_pages = mm_pages(mm, COUNTER_SHMEM);
	out->swap_pages = mm_pages(mm, COUNTER_SWAP);
	out->page_table_bytes = BPF_CORE_READ(mm, pgtables_bytes.counter);
	out->total_vm_pages = BPF_CORE_READ(mm, total_vm);
	return 0;
}

/* Fills in why the kernel kills, and for whom. */
static __noinline int read_oom_control(struct event *event, struct oom_control *oc)
{
	struct mem_cgroup *memcg = BPF_CORE_READ(oc, memcg);
	struct cgroup *cgroup;
	const char *name;

	event->total_pages = BPF_CORE_READ(oc, totalpages);
	event->gfp_flags = BPF_CORE_READ(oc, gfp_mask);
	event->order = BPF_CORE_READ(oc, order);
	if (event->order == -1) {
		event->kind = OOM_SYSRQ;
	} else if (memcg) {
		event->kind = OOM_MEMCG;
		event->limit_pages = BPF_CORE_READ(memcg, memory.max);
		cgroup = BPF_CORE_READ(memcg, css.cgroup);
		/* Ids of hierarchies other than the default one mean nothing to user space. */
		if (!BPF_CORE_READ(cgroup, root, hierarchy_id))
			event->limit_cgroup = BPF_CORE_READ(cgroup, kn, id);
		name = BPF_CORE_READ(cgroup, kn, name);
		bpf_probe_read_kernel_str(event->limit_name, sizeof(event->limit_name), name);
	} else if (BPF_CORE_READ(oc, constraint) == CONSTRAINT_NONE) {
		event->kind = OOM_GLOBAL;
	} else {
		event->kind = OOM_CPUSET;
	}
	return 0;
}

/* Adds what is known of the victim. A victim that is a followed process sets `wanted`. */
static __always_inline void add_victim(struct event *event, struct task_struct *victim)
{
	describe(&event->victim, victim);
	if (filter.follow && filter_follows(victim))
		event->wanted = true;
}

/*
 * Makes an event with what is known of the current task. If the options do not match that task,
 * they may still match its victim: user space checks both.
 */
static __always_inline struct event *event_of_current(void *ctx, enum event_kind kind)
{
	__u64 kernel_stack = 0, user_stack = 0;
	struct task_ids ids = {};
	bool wanted = filter_wants(&ids);
	struct event *event;

	if (want_stacks && (kind == EVENT_KILL || only_victims)) {
		kernel_stack = stack_of_kernel(ctx);
		user_stack = stack_of_task();
	}
	event = event_reserve(sizeof(*event));
	if (!event)
		return NULL;
	__builtin_memset(event, 0, sizeof(*event));
	event->time_ns = bpf_ktime_get_ns();
	event->event = kind;
	event->kind = OOM_UNKNOWN;
	event->total_pages = UNKNOWN;
	event->limit_pages = UNKNOWN;
	event->kernel_stack = kernel_stack;
	event->user_stack = user_stack;
	event->wanted = wanted;
	event->pid = ids.pid;
	event->tid = ids.tid;
	bpf_get_current_comm(event->comm, sizeof(event->comm));
	return event;
}

static __always_inline int kill(void *ctx, struct oom_control *oc)
{
	struct event *event = event_of_current(ctx, EVENT_KILL);

	if (!event)
		return 0;
	read_oom_control(event, oc);
	add_victim(event, BPF_CORE_READ(oc, chosen));
	bpf_ringbuf_submit(event, 0);
	return 0;
}

SEC("fentry/oom_kill_process")
int BPF_PROG(kill_fentry, struct oom_control *oc)
{
	return kill(ctx, oc);
}

SEC("kprobe/oom_kill_process")
int BPF_KPROBE(kill_kprobe, struct oom_control *oc)
{
	return kill(ctx, oc);
}

SEC("raw_tp/mark_victim")
int mark_victim(struct bpf_raw_tracepoint_args *ctx)
{
	struct event *event = event_of_current(ctx, EVENT_VICTIM);

	if (!event)
		return 0;
	add_victim(event, (struct task_struct *)ctx->args[0]);
	bpf_ringbuf_submit(event, 0);
	return 0;
}

SEC("tracepoint/oom/mark_victim")
int mark_victim_pid(struct trace_event_raw_mark_victim *ctx)
{
	__u32 victim = ctx->pid;
	struct event *event = event_of_current(ctx, EVENT_VICTIM);

	if (!event)
		return 0;
	/* The pid is of the initial namespace. Without the task it cannot be translated. */
	if (!filter.pid_namespace)
		event->victim.pid = victim;
	bpf_ringbuf_submit(event, 0);
	return 0;
}
