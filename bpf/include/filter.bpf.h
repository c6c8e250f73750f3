/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Filter of the tasks that are traced, and the PIDs and TIDs by which they are reported.
 *
 * User space (src/process/filter.rs) sets `filter` before load. The kernel's verifier then knows
 * its values, and removes the tests of options that were not given.
 */
#ifndef MEMTOOLS_FILTER_BPF_H
#define MEMTOOLS_FILTER_BPF_H

#include "memtools.bpf.h"
#include "task_ids.bpf.h"

enum filter_table {
	FILTER_SLOT_BITS = 11,
	FILTER_SLOTS = 1 << FILTER_SLOT_BITS,
	FILTER_PROBES = 8,
};
#define COMM_BYTES 16

struct filter {
	/*
	 * Hash table of PIDs, if pid_count is not 0. Each PID is in one of FILTER_PROBES slots,
	 * from the slot of its hash on; empty slots are 0. If tid is not 0, only that thread is
	 * traced, whatever its process.
	 */
	__u32 pids[FILTER_SLOTS];
	__u32 pid_factor;
	__u32 pid_count;
	__u32 only_pid; /* the PID, if pid_count is 1 */
	__u32 tid;
	__u32 own_pid;	     /* the tool's own PID, never traced: own_events counts it */
	__u32 pid_namespace; /* inode of the tool's PID namespace, 0: the initial one */
	/* Text that comm must contain, with 0xff in the mask for each of its bytes. */
	__u8 name[COMM_BYTES];
	__u8 name_mask[COMM_BYTES];
	__u8 by_name;
	__u8 by_cgroup;
	__u8 follow; /* 1: also trace all descendants of the processes in `pids` */
	__u8 reserved[5];
};

const volatile struct filter filter;

/* Cgroup (v2) that tasks must be in or below, if by_cgroup. */
struct {
	__uint(type, BPF_MAP_TYPE_CGROUP_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} filter_cgroup SEC(".maps");

/*
 * Processes that are followed, by the address of their signal_struct. A process has its own
 * signal_struct from its fork to its end, whichever of its threads calls exec. A PID can be reused
 * before the last event of its process arrives. Filled by follow.bpf.c.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1); /* src/process/follow.rs replaces the map by a larger one */
	__type(key, __u64);
	__type(value, __u8);
} filter_followed SEC(".maps");

/* Returns the PID and TID of any task in the tool's PID namespace. */
static __always_inline struct task_ids ids_of(struct task_struct *task)
{
	return task_ids_in(task, filter.pid_namespace);
}

/* Returns the PID and TID of the current task in the tool's PID namespace. */
static __always_inline struct task_ids ids_of_current(void)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct task_ids ids = { .pid = thread >> 32, .tid = (__u32)thread };

	if (filter.pid_namespace)
		ids = ids_of((struct task_struct *)bpf_get_current_task());
	return ids;
}

static __always_inline bool filter_wants_pid(__u32 pid)
{
	__u32 slot = pid * filter.pid_factor >> (32 - FILTER_SLOT_BITS);

	if (filter.pid_count == 1)
		return pid == filter.only_pid;
	for (__u32 i = 0; i < FILTER_PROBES; i++) {
		__u32 here = filter.pids[(slot + i) & (FILTER_SLOTS - 1)];

		if (here == pid)
			return true;
		if (!here)
			return false;
	}
	return false;
}

/* Returns the key of a task's process in `filter_followed`. */
static __always_inline __u64 filter_process_of(struct task_struct *task)
{
	return (__u64)BPF_CORE_READ(task, signal);
}

/* Whether the process of a task is followed. */
static __always_inline bool filter_follows(struct task_struct *task)
{
	__u64 process = filter_process_of(task);

	return bpf_map_lookup_elem(&filter_followed, &process);
}

/*
 * Whether the current task's comm contains the name. At each of the 16 offsets where the name can
 * begin, 16 bytes are compared at a time and without a branch: a branch would double the verifier's
 * work at each offset.
 */
static __noinline bool filter_wants_name(void)
{
	const volatile __u64 *name = (const volatile __u64 *)filter.name;
	const volatile __u64 *mask = (const volatile __u64 *)filter.name_mask;
	__u64 comm[2], found = 0;

	bpf_get_current_comm(comm, sizeof(comm));
	for (int i = 0; i < COMM_BYTES; i++) {
		found |= !(((comm[0] ^ name[0]) & mask[0]) | ((comm[1] ^ name[1]) & mask[1]));
		comm[0] = comm[0] >> 8 | comm[1] << 56;
		comm[1] >>= 8;
	}
	return found;
}

static __always_inline bool filter_wants_cgroup(void)
{
	return !filter.by_cgroup || bpf_current_task_under_cgroup(&filter_cgroup, 0) == 1;
}

/* Counts an event of the tool itself if the options would match it for any other process. */
static __noinline void filter_leave_out_own(void)
{
	if (filter.tid || filter.pid_count || (filter.by_name && !filter_wants_name()))
		return;
	if (filter_wants_cgroup())
		count_loss(own_events);
}

/*
 * Whether the options match the current task. Sets `ids` to its PID and TID. The tool itself never
 * matches; its events are counted.
 */
static __always_inline bool filter_wants(struct task_ids *ids)
{
	*ids = ids_of_current();
	if (ids->pid == filter.own_pid) {
		filter_leave_out_own();
		return false;
	}
	if (filter.tid) {
		if (ids->tid != filter.tid)
			return false;
	} else if (filter.pid_count && !filter_wants_pid(ids->pid) &&
		   !(filter.follow &&
		     filter_follows((struct task_struct *)bpf_get_current_task()))) {
		return false;
	}
	if (filter.by_name && !filter_wants_name())
		return false;
	return filter_wants_cgroup();
}

#endif /* MEMTOOLS_FILTER_BPF_H */
