// SPDX-License-Identifier: BSD-2-Clause
/*
 * ffaults: page faults, by file.
 *
 * Hooks, of which tools/ffaults/attach.rs chooses: the return of handle_mm_fault, by fexit
 * or by kprobe and kretprobe; the software perf event page-faults with
 * bpf_find_vma(), 5.17 and later.
 */
#include "cgroup_path.bpf.h"
#include "count.bpf.h"
#include "file.bpf.h"
#include "filter.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Memory that a fault is on. */
enum memory {
	MEMORY_FILE,
	MEMORY_ANONYMOUS,
	MEMORY_HEAP,
	MEMORY_STACK,
	MEMORY_UNKNOWN, /* no mapping, or one that another thread is changing */
	MEMORIES,
};

struct file_id {
	__u64 inode;
	__u32 device;
	__u32 generation; /* inode numbers are reused */
};

struct count_key {
	struct file_id file; /* of MEMORY_FILE */
	enum memory memory;
	__u32 pid; /* 0, with an empty comm, unless by_process */
	char comm[16];
};

struct count {
	__u64 faults;
	__u64 major;
	__u64 write;
	__u64 exec;
	__u64 cgroup; /* of the last fault with by_process; see cgroup_of_current() */
};

/* Name of a file, or the names of its path (file.bpf.h). */
struct file_record {
	__u32 bytes;
	__u32 complete;
	char names[FILE_PATH_BYTES];
};

/* Part of struct file_record that is used without full_path. */
struct name_record {
	__u32 bytes;
	__u32 complete;
	char name[FILE_NAME_BYTES];
};
EXPORT_TYPE(struct name_record);

EXPORT_TYPE(struct count_key);

/* Options, set before load. */
const volatile __u8 by_process;
const volatile __u8 full_path;

/* Capacity of the map of names, in files. */
#define FILES 4096

/* Counts by file alone; tools/ffaults/attach.rs makes the maps larger with by_process. */
COUNTS_OF_SIZES(counts, sizeof(struct count_key), sizeof(struct count), FILES + MEMORIES);

/*
 * Names of files. Sizes of keys and values alone: without full_path values are a struct
 * name_record.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, FILES);
	__uint(key_size, sizeof(struct file_id));
	__uint(value_size, sizeof(struct file_record));
} files SEC(".maps");

const volatile struct count no_count;
const volatile struct file_record no_record;

/* Fault that a thread is in, by pid_tgid; for kretprobes, which do not have the arguments. */
struct call {
	struct vm_area_struct *vma;
	__u64 flags;
};

BY_THREAD(calls, struct call);

/* FAULT_FLAG_* of <linux/mm_types.h>: macros on 5.10, with the same values since. */
#define FLAG_WRITE	 0x001
#define FLAG_TRIED	 0x020
#define FLAG_INSTRUCTION 0x100
/* VM_FAULT_* likewise. */
#define RESULT_MAJOR 0x000004
#define RESULT_RETRY 0x000400

/* Stores the name or the path of a file that is seen for the first time. */
static __noinline int remember_file(struct file *file, const struct file_id *id)
{
	struct file_record *record = bpf_map_lookup_elem(&files, id);

	if (record)
		return 0;
	bpf_map_update_elem(&files, id, (const void *)&no_record, BPF_NOEXIST);
	record = bpf_map_lookup_elem(&files, id);
	if (!record) {
		count_loss(entries);
		return 0;
	}
	if (full_path)
		record->bytes = file_path(file, record->names, &record->complete);
	else
		record->bytes = file_name(file, record->names);
	return 0;
}

static __always_inline enum memory memory_of(struct vm_area_struct *vma)
{
	struct mm_struct *mm = BPF_CORE_READ(vma, vm_mm);
	__u64 start = BPF_CORE_READ(vma, vm_start), end = BPF_CORE_READ(vma, vm_end);
	__u64 stack = BPF_CORE_READ(mm, start_stack);

	if (start <= BPF_CORE_READ(mm, brk) && end >= BPF_CORE_READ(mm, start_brk))
		return MEMORY_HEAP;
	if (start <= stack && end >= stack)
		return MEMORY_STACK;
	return MEMORY_ANONYMOUS;
}

static __noinline int count_fault(struct vm_area_struct *vma, __u32 pid, __u32 flags, __u32 major)
{
	struct count_key key = { .memory = MEMORY_UNKNOWN };
	struct file *file = NULL;
	struct count *count;

	if (vma)
		file = BPF_CORE_READ(vma, vm_file);
	if (file) {
		struct inode *inode = BPF_CORE_READ(file, f_inode);

		key.memory = MEMORY_FILE;
		key.file.inode = BPF_CORE_READ(inode, i_ino);
		key.file.device = BPF_CORE_READ(inode, i_sb, s_dev);
		key.file.generation = BPF_CORE_READ(inode, i_generation);
		remember_file(file, &key.file);
	} else if (vma) {
		key.memory = memory_of(vma);
	}
	if (by_process) {
		key.pid = pid;
		bpf_get_current_comm(key.comm, sizeof(key.comm));
	}
	count = count_of(counts, &key, (const void *)&no_count);
	if (!count)
		return 0;
	__sync_fetch_and_add(&count->faults, 1);
	if (major)
		__sync_fetch_and_add(&count->major, 1);
	if (flags & FLAG_WRITE)
		__sync_fetch_and_add(&count->write, 1);
	if (flags & FLAG_INSTRUCTION)
		__sync_fetch_and_add(&count->exec, 1);
	if (with_cgroups)
		count->cgroup = cgroup_of_current();
	return 0;
}

/*
 * Handles the return of handle_mm_fault(). A fault can take several calls: the first gives up, to
 * wait without the lock, or to go on with a larger lock. The last call is the one that does not ask
 * for another. The fault is major if this call, or one before it, waited: mm_account_fault().
 */
static __always_inline int finished(struct vm_area_struct *vma, __u32 flags, __u32 result,
				    __u32 pid)
{
	if (result & RESULT_RETRY)
		return 0;
	return count_fault(vma, pid, flags, result & RESULT_MAJOR || flags & FLAG_TRIED);
}

SEC("fexit/handle_mm_fault")
int BPF_PROG(fault_fexit, struct vm_area_struct *vma, unsigned long address, unsigned int flags,
	     struct pt_regs *regs, unsigned int result)
{
	struct task_ids ids;

	return filter_wants(&ids) ? finished(vma, flags, result, ids.pid) : 0;
}

SEC("kprobe/handle_mm_fault")
int BPF_KPROBE(fault_kprobe, struct vm_area_struct *vma, unsigned long address, unsigned int flags)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct call call = { .vma = vma, .flags = flags };
	struct task_ids ids;

	if (!filter_wants(&ids))
		return 0;
	begin_call(&calls, thread, &call);
	return 0;
}

SEC("kretprobe/handle_mm_fault")
int BPF_KRETPROBE(fault_kretprobe, unsigned int result)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct call *found = bpf_map_lookup_elem(&calls, &thread);
	struct call call;

	if (!found)
		return 0;
	call = *found;
	bpf_map_delete_elem(&calls, &thread);
	return finished(call.vma, call.flags, result, ids_of_current().pid);
}

SEC("raw_tp/sched_process_exit")
int thread_exit(void *ctx)
{
	lose_call(&calls);
	return 0;
}

struct found {
	__u32 pid;
	__u32 major;
};

static long found_vma(struct task_struct *task, struct vm_area_struct *vma, struct found *found)
{
	return count_fault(vma, found->pid, 0, found->major);
}

/*
 * Counts a fault event. The kernel finds the mapping only if no thread is changing the mappings:
 * otherwise the memory is unknown.
 */
static __always_inline int happened(struct bpf_perf_event_data *ctx, __u32 major)
{
	struct found found = { .major = major };
	struct task_ids ids;

	if (!filter_wants(&ids))
		return 0;
	found.pid = ids.pid;
	if (bpf_find_vma(bpf_get_current_task_btf(), ctx->addr, found_vma, &found, 0))
		count_fault(NULL, ids.pid, 0, major);
	return 0;
}

SEC("perf_event")
int fault_event(struct bpf_perf_event_data *ctx)
{
	return happened(ctx, 0);
}

SEC("perf_event")
int major_fault_event(struct bpf_perf_event_data *ctx)
{
	return happened(ctx, 1);
}
