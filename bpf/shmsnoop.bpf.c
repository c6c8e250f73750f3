// SPDX-License-Identifier: BSD-2-Clause
/*
 * shmsnoop: the system calls of System V shared memory.
 *
 * Hooks: their tracepoints. At entry the arguments are stored by thread; at exit a call goes to
 * user space as one event, with the segment's state if that is requested. From 7.2 on a task can be
 * preempted in a program on these tracepoints, and the program is skipped for all other tasks on
 * that CPU meanwhile: these kernels get kprobes of the system calls' functions (src/bpf/attach.rs).
 */
#include "arch_system_call.bpf.h"
#include "cgroup_path.bpf.h"
#include "event.bpf.h"
#include "filter.bpf.h"
#include "mapping_tree.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define IPC_SHM_IDS	   2
#define IPC_INDEX_BITS	   15 /* of an id, the rest is a sequence number */
#define IPC_INDEX_BITS_MAX 24 /* with ipcmni_extend on the kernel's command line */
#define XA_NODE_TAG	   2
#define XA_NODE_SLOTS	   64
#define XA_LEVELS	   5
#define EBUSY		   16

/* Commands of shmctl() whose first argument is no id. */
#define IPC_INFO     3	/* the argument is unused */
#define SHM_STAT     13 /* an index; the call returns the id */
#define SHM_INFO     14 /* the argument is unused */
#define SHM_STAT_ANY 15 /* an index, as with SHM_STAT */

enum call_kind {
	CALL_SHMGET,
	CALL_SHMAT,
	CALL_SHMDT,
	CALL_SHMCTL,
};

/* Segment, as ipcs(1) shows it. */
struct segment {
	__u64 size;	/* bytes */
	__u64 attached; /* how many times */
	__u32 creator_pid;
	__u32 known; /* 0: no segment has that id, and the fields above are not valid */
};

struct event {
	__u64 time_ns;	  /* CLOCK_MONOTONIC, at exit */
	__u64 latency_ns; /* from entry to exit */
	__u64 args[3];	  /* the system call's, in its order */
	__u64 cgroup;	  /* the task's, as cgroup_of_current() returns it */
	__s64 result;
	struct segment segment; /* before shmdt and shmctl (an id), after all other calls */
	__u32 pid;
	__u32 tid;
	enum call_kind kind;
	__u32 reserved;
	char comm[COMM_BYTES];
};
EXPORT_TYPE(struct event);

/* Call that a thread is in. */
struct call {
	__u64 begin_ns;
	__u64 args[3];
	struct segment segment;
	struct task_ids ids;
};

/* Options, set before load. */
const volatile __u8 with_segment;

BY_THREAD(calls, struct call);

/*
 * Goes one step down the tree in which the kernel keeps segments. Returns the entry of a node for
 * an index.
 */
static __noinline void *tree_step(void *entry, __u32 index)
{
	struct xa_node *node = entry - XA_NODE_TAG;
	__u32 slot = (index >> (BPF_CORE_READ(node, shift) & 31)) % XA_NODE_SLOTS;
	void **slots = (void *)node + bpf_core_field_offset(node->slots);
	void *next = NULL;

	bpf_probe_read_kernel(&next, sizeof(next), &slots[slot]);
	return next;
}

static __noinline int segment_at(__u32 id, __u32 index, struct segment *segment)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task();
	struct ipc_namespace *namespace = BPF_CORE_READ(task, nsproxy, ipc_ns);
	void *entry = BPF_CORE_READ(namespace, ids[IPC_SHM_IDS].ipcs_idr.idr_rt.xa_head);
	struct shmid_kernel *shm;

	for (int i = 0; i < XA_LEVELS && ((__u64)entry & 3) == XA_NODE_TAG; i++)
		entry = tree_step(entry, index);
	shm = entry - bpf_core_field_offset(struct shmid_kernel, shm_perm);
	if (!entry || (__u32)BPF_CORE_READ(shm, shm_perm.id) != id)
		return 0;
	segment->size = BPF_CORE_READ(shm, shm_segsz);
	segment->attached = BPF_CORE_READ(shm, shm_nattch);
	segment->creator_pid =
	    number_in_namespace(BPF_CORE_READ(shm, shm_cprid), filter.pid_namespace);
	segment->known = 1;
	return 1;
}

static __always_inline void segment_of(__u32 id, struct segment *segment)
{
	if (!segment_at(id, id % (1 << IPC_INDEX_BITS), segment))
		segment_at(id, id % (1 << IPC_INDEX_BITS_MAX), segment);
}

static __always_inline bool takes_index(__u32 command)
{
	return command == SHM_STAT || command == SHM_STAT_ANY;
}

static __always_inline bool takes_id(__u32 command)
{
	return command != IPC_INFO && command != SHM_INFO && !takes_index(command);
}

static __always_inline int begin(struct call *call)
{
	__u64 thread = bpf_get_current_pid_tgid();

	call->begin_ns = bpf_ktime_get_ns();
	begin_call(&calls, thread, call);
	return 0;
}

static __always_inline int end(__u32 kind, long result)
{
	__u64 now = bpf_ktime_get_ns(), thread = bpf_get_current_pid_tgid();
	struct call *call = bpf_map_lookup_elem(&calls, &thread);
	struct event *event;

	if (!call)
		return 0;
	if (with_segment) {
		if (kind == CALL_SHMGET && result >= 0)
			segment_of(result, &call->segment);
		else if (kind == CALL_SHMAT && result >= 0)
			segment_of(call->args[0], &call->segment);
		else if (kind == CALL_SHMDT && result < 0) /* the address was no segment's */
			call->segment.known = 0;
		else if (kind == CALL_SHMCTL && takes_index(call->args[1]) && result >= 0)
			segment_of(result, &call->segment);
	}
	event = event_reserve(sizeof(*event));
	if (event) {
		event->time_ns = now;
		event->latency_ns = now - call->begin_ns;
		__builtin_memcpy(event->args, call->args, sizeof(event->args));
		event->cgroup = cgroup_of_current();
		event->result = result;
		event->segment = call->segment;
		event->pid = call->ids.pid;
		event->tid = call->ids.tid;
		event->kind = kind;
		event->reserved = 0;
		bpf_get_current_comm(event->comm, sizeof(event->comm));
		bpf_ringbuf_submit(event, 0);
	}
	bpf_map_delete_elem(&calls, &thread);
	return 0;
}

/* Argument that is a C int: the upper 32 bits of its register mean nothing. */
#define INT(argument) ((__u32)(argument))

/*
 * Define the programs of a system call, on its tracepoints and on its function: its entry calls
 * `name`_begins with its first three arguments, its exit calls end().
 */
#define ENTRY(name)                                                                                \
	SEC("tracepoint/syscalls/sys_enter_" #name)                                                \
	int name##_enter(struct syscall_trace_enter *ctx)                                          \
	{                                                                                          \
		return name##_begins(ctx->args[0], ctx->args[1], ctx->args[2]);                    \
	}                                                                                          \
	ENTRY_OF_FUNCTION(name)

#define ENTRY_OF_FUNCTION(name)                                                                    \
	SEC("?kprobe/" SYSTEM_CALL #name)                                                          \
	int name##_enter_function(struct pt_regs *ctx)                                             \
	{                                                                                          \
		struct pt_regs *regs = PT_REGS_SYSCALL_REGS(ctx);                                  \
                                                                                                   \
		return name##_begins(PT_REGS_PARM1_CORE_SYSCALL(regs),                             \
				     PT_REGS_PARM2_CORE_SYSCALL(regs),                             \
				     PT_REGS_PARM3_CORE_SYSCALL(regs));                            \
	}

#define EXIT(name, kind)                                                                           \
	SEC("tracepoint/syscalls/sys_exit_" #name)                                                 \
	int name##_exit(struct syscall_trace_exit *ctx)                                            \
	{                                                                                          \
		return end(kind, ctx->ret);                                                        \
	}                                                                                          \
	SEC("?kretprobe/" SYSTEM_CALL #name)                                                       \
	int name##_exit_function(struct pt_regs *ctx)                                              \
	{                                                                                          \
		return end(kind, PT_REGS_RC(ctx));                                                 \
	}

static __always_inline int shmget_begins(__u64 key, __u64 size, __u64 flags)
{
	struct call call = { .args = { INT(key), size, INT(flags) } };

	return filter_wants(&call.ids) ? begin(&call) : 0;
}
ENTRY(shmget)

EXIT(shmget, CALL_SHMGET)

static __always_inline int shmat_begins(__u64 id, __u64 address, __u64 flags)
{
	struct call call = { .args = { INT(id), address, INT(flags) } };

	return filter_wants(&call.ids) ? begin(&call) : 0;
}
ENTRY(shmat)

EXIT(shmat, CALL_SHMAT)

/*
 * Reads the segment that shmdt(2) detaches, by its mapping, as shmdt(2) has no id. The mapping
 * begins with the segment's first page, and the inode number of its file is the segment's id. A
 * file of another kind does no harm: the call fails then.
 */
static __always_inline void segment_mapped(__u64 pgoff, struct file *file, struct segment *segment)
{
	if (!pgoff && file)
		segment_of(BPF_CORE_READ(file, f_inode, i_ino), segment);
}

static long found_vma(struct task_struct *task, struct vm_area_struct *vma, struct call *call)
{
	if (vma->vm_start == call->args[0])
		segment_mapped(vma->vm_pgoff, vma->vm_file, &call->segment);
	return 0;
}

static __always_inline int shmdt_begins(__u64 address, __u64 none, __u64 also_none)
{
	struct call call = { .args = { address } };

	if (!filter_wants(&call.ids))
		return 0;
	/* bpf_find_vma() does not wait for a thread that is changing the mappings. */
	if (with_segment &&
	    bpf_find_vma(bpf_get_current_task_btf(), call.args[0], found_vma, &call, 0) == -EBUSY)
		count_loss(lookups);
	return begin(&call);
}
ENTRY(shmdt)

static __noinline int segment_in_tree(__u64 address, struct segment *segment)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task();
	struct vm_area_struct *vma =
	    (void *)mapping_in_tree((__u64)BPF_CORE_READ(task, mm), address);

	if (vma && BPF_CORE_READ(vma, vm_start) == address)
		segment_mapped(BPF_CORE_READ(vma, vm_pgoff), BPF_CORE_READ(vma, vm_file), segment);
	return 0;
}

/* Handles the entry of shmdt(2) on kernels without bpf_find_vma(), before 5.17. */
SEC("tracepoint/syscalls/sys_enter_shmdt")
int shmdt_enter_by_tree(struct syscall_trace_enter *ctx)
{
	struct call call = {};

	if (!filter_wants(&call.ids))
		return 0;
	call.args[0] = ctx->args[0];
	if (with_segment)
		segment_in_tree(call.args[0], &call.segment);
	return begin(&call);
}

EXIT(shmdt, CALL_SHMDT)

static __always_inline int shmctl_begins(__u64 id, __u64 command, __u64 buffer)
{
	struct call call = { .args = { INT(id), INT(command), buffer } };

	if (!filter_wants(&call.ids))
		return 0;
	/* After the call, IPC_RMID may have removed the segment. */
	if (with_segment && takes_id(call.args[1]))
		segment_of(call.args[0], &call.segment);
	return begin(&call);
}
ENTRY(shmctl)
EXIT(shmctl, CALL_SHMCTL)

SEC("raw_tp/sched_process_exit")
int thread_exit(void *ctx)
{
	lose_call(&calls);
	return 0;
}
