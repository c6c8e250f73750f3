/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * What user space knows of how to unwind code: from .eh_frame, for every
 * instruction of every file that a process has mapped, the rule by which its
 * caller is found.
 *
 * src/unwind builds it and keeps it up to date. Everything is in words of eight
 * bytes, in shards of one size that are added as they are needed. Nothing that a
 * program can reach is ever changed: a process's mappings are written anew,
 * and then its entry in `unwind_processes` is replaced.
 */
#ifndef MEMTOOLS_UNWIND_BPF_H
#define MEMTOOLS_UNWIND_BPF_H

#include "task_ids.bpf.h"

/* Options, set before load. */
enum unwind_mode {
	UNWIND_MODE_FP,	   /* by frame pointers alone */
	UNWIND_MODE_AUTO,  /* by tables, or by frame pointers in a process that has none yet */
	UNWIND_MODE_DWARF, /* by tables, or not at all */
};
const volatile __u8 unwind_mode;
const volatile __u32 unwind_namespace; /* inode of the tool's PID namespace, 0: the initial one */

#define UNWIND_SHARD_WORDS   (1 << 18)
#define UNWIND_SHARDS	     128
#define UNWIND_PROCESSES     4096
#define UNWIND_CACHED	     16384
#define UNWIND_REQUEST_BYTES (16 << 10)
#define UNWIND_PAGE_SHIFT    8	/* of code, by which rows are found */
#define UNWIND_MAPPING_STEPS 13 /* 8191 mappings */
#define UNWIND_ROW_STEPS     10 /* a row for each byte of a page, and more */
/* How long user space gets for an answer, before it is asked again. */
#define UNWIND_PATIENCE_NS (20 * 1000000ULL)

/*
 * How to get from a frame to its caller's. CFA is where its stack pointer was
 * before the call; the return address is at CFA - 8.
 *
 *	bits 63:32  the address in the file from which the rule is valid; where a
 *	            rule has been looked up, the number of the file
 *	     31:16  offset of CFA in words
 *	     15:8   offset of the saved frame pointer in words
 *	      7:4   enum unwind_frame_pointer
 *	      3:0   enum unwind_kind
 */
enum unwind_kind {
	UNWIND_NO_RULE,	   /* code without unwind information: generated, or assembler's */
	UNWIND_BY_SP,	   /* CFA = sp + offset */
	UNWIND_BY_FP,	   /* CFA = fp + offset */
	UNWIND_PLT,	   /* CFA = sp + 8, or + 16 from that byte of the PLT's entry on: offset */
	UNWIND_SIGNAL,	   /* the kernel's frame of a signal is at sp */
	UNWIND_ROOT,	   /* there is no caller */
	UNWIND_THROUGH_FP, /* CFA = the word at fp + offset's upper byte, + offset's lower byte */
	UNWIND_THROUGH_SP, /* the same with sp */
	UNWIND_STRANGE,	   /* a rule that no row can hold */
	UNWIND_NO_CODE,	   /* nothing that the process has mapped is there, as far as is known */
	UNWIND_NO_ROOM,	   /* there are rules, for which there was no room */
};

enum unwind_frame_pointer {
	UNWIND_FP_KEPT,	     /* the caller's is in its register */
	UNWIND_FP_AT_CFA,    /* it is at CFA + offset */
	UNWIND_FP_AT_FP,     /* it is at fp + offset */
	UNWIND_FP_FORGOTTEN, /* it is lost */
};

struct unwind_shard {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, UNWIND_SHARD_WORDS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64);
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, UNWIND_SHARDS);
	__type(key, __u32);
	__array(values, struct unwind_shard);
} unwind_shards SEC(".maps");

/*
 * By process, where its mappings are:
 *
 *	bits 31:0   the first word, never 0
 *	     47:32  how many mappings
 *	     63:48  generation: different for each list, so that none is mistaken
 *	            for what was in the same place before
 *
 * and there: a word with the generation (15:0) and how many pages of code the
 * process had (63:16); the start of each mapping, ascending; then for each
 *
 *	its end
 *	what is to be subtracted from its addresses to have those in the file
 *	first word (31:0) and number (63:32) of the file's pages, 0 without a table,
 *	UNWIND_TABLE_LEFT_OUT if there was no room for it
 *	number of the first of these pages (31:0), number of the file (63:32)
 *
 * A page's word has the first row (31:0) and number (63:32) of the rows that
 * are valid somewhere in it.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, UNWIND_PROCESSES);
	__type(key, __u32);
	__type(value, __u64);
} unwind_processes SEC(".maps");

#define UNWIND_MAPPING_WORDS  4
#define UNWIND_TABLE_LEFT_OUT 1

/* Rules that were looked up, by a mix of the process's entry and the address. */
struct unwind_cached {
	__u64 check; /* the mix, xor the row: half of another's entry never fits */
	__u64 row;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, UNWIND_CACHED);
	__type(key, __u32);
	__type(value, struct unwind_cached);
} unwind_cache SEC(".maps");

/* Processes whose mappings user space is to look at. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, UNWIND_REQUEST_BYTES);
} unwind_requests SEC(".maps");

/* By process, CLOCK_MONOTONIC before which it is not to be asked about again. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, UNWIND_PROCESSES);
	__type(key, __u32);
	__type(value, __u64);
} unwind_asked SEC(".maps");

/* By file, how many stacks have ended in it for want of a rule. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, __u64);
} unwind_missing SEC(".maps");

static __always_inline __u32 unwind_process_of_current(void)
{
	struct task_struct *task = (void *)bpf_get_current_task();

	if (!unwind_namespace)
		return bpf_get_current_pid_tgid() >> 32;
	return task_ids_in(task, unwind_namespace).pid;
}

static __always_inline __u64 unwind_read(__u64 number)
{
	__u32 shard_number = number / UNWIND_SHARD_WORDS, word_number;
	void *shard = bpf_map_lookup_elem(&unwind_shards, &shard_number);
	__u64 *word;

	if (!shard)
		return 0;
	word_number = number % UNWIND_SHARD_WORDS;
	word = bpf_map_lookup_elem(shard, &word_number);
	return word ? *word : 0;
}

/*
 * One word. Global as the other two below, so that the verifier follows it once:
 * scalars in, scalars out. Not more of them: programs may be eight calls deep.
 */
__noinline __u64 unwind_word(__u64 number)
{
	return unwind_read(number);
}

/*
 * Which of `count` words from `first` on, ascending, is the last that is not
 * greater: its number. 0: none. Their lower bits, `ignored`, do not count.
 */
__noinline __u64 unwind_search(__u64 first, __u64 count, __u64 value, __u64 ignored)
{
	__u64 low = first, high = first + count;

	for (int i = 0; i < UNWIND_MAPPING_STEPS; i++) {
		__u64 middle = (low + high) / 2;

		if (low >= high)
			break;
		if (unwind_read(middle) >> ignored <= value)
			low = middle + 1;
		else
			high = middle;
	}
	return low > first ? low - 1 : 0;
}

/* The rule of a mapping, whose description is at `mapping`, for an address in it. */
static __always_inline __u64 unwind_rule(__u64 mapping, __u64 pc)
{
	__u64 address = pc - unwind_word(mapping + 1), pages = unwind_word(mapping + 2);
	__u64 first = unwind_word(mapping + 3), file = first & 0xffffffff00000000ULL;
	__u64 page = (address >> UNWIND_PAGE_SHIFT) - (__u32)first, row;

	if (pages == UNWIND_TABLE_LEFT_OUT)
		return file | UNWIND_NO_ROOM;
	if (page >= pages >> 32)
		return file | UNWIND_NO_RULE;
	row = unwind_word((__u32)pages + page);
	row = unwind_search((__u32)row, row >> 32, address, 32);
	return file | (row ? (__u32)unwind_word(row) : UNWIND_NO_RULE);
}

/*
 * musl's rt_sigreturn() has no unwind information: mov $15,%rax; syscall. Only
 * its first eight bytes are looked at.
 */
#define SIGRETURN_CODE 0x0f0000000fc0c748ULL

static __always_inline __u64 unwind_find(__u64 process, __u64 pc)
{
	__u64 first = (__u32)process + 1, count = process >> 32 & 0xffff;
	__u64 mapping = unwind_search(first, count, pc, 0), row, code = 0;

	if (!mapping)
		return UNWIND_NO_CODE;
	mapping = first + count + (mapping - first) * UNWIND_MAPPING_WORDS;
	if (pc >= unwind_word(mapping))
		return UNWIND_NO_CODE;
	row = unwind_rule(mapping, pc);
	if ((row & 0xf) == UNWIND_NO_RULE &&
	    !bpf_probe_read_user(&code, sizeof(code), (void *)(pc + 1)) && code == SIGRETURN_CODE)
		row |= UNWIND_SIGNAL;
	return row;
}

/* The rule for an address of the process, and the number of the file that it is of. */
__noinline __u64 unwind_row(__u64 process, __u64 pc)
{
	__u64 key = (pc ^ process * 0x9e3779b97f4a7c15ULL) * 0xd6e8feb86659fd93ULL;
	__u32 place = key >> 50; /* UNWIND_CACHED */
	volatile struct unwind_cached *cached = bpf_map_lookup_elem(&unwind_cache, &place);
	__u64 row;

	if (!cached)
		return UNWIND_NO_CODE;
	row = cached->row;
	if ((cached->check ^ row) == key)
		return row;
	row = unwind_find(process, pc);
	if ((row & 0xf) != UNWIND_NO_CODE) {
		cached->check = key ^ row;
		cached->row = row;
	}
	return row;
}

/* Ask user space for the mappings of a process, unless it was asked just now. */
static __noinline int unwind_ask(__u32 pid)
{
	__u64 now = bpf_ktime_get_ns();
	__u64 *not_before = bpf_map_lookup_elem(&unwind_asked, &pid);

	if (not_before && now < *not_before)
		return 0;
	now += UNWIND_PATIENCE_NS;
	bpf_map_update_elem(&unwind_asked, &pid, &now, BPF_ANY);
	bpf_ringbuf_output(&unwind_requests, &pid, sizeof(pid), 0);
	return 0;
}

/*
 * How many pages of code the current task's process has mapped. It changes with
 * all that can make a list of mappings outdated: dlopen(3), dlclose(3), exec.
 */
static __noinline __u64 pages_of_code(void)
{
	struct task_struct *task;

	/* As in task_stack.bpf.h; by the verifier's own loads it takes a tenth of the time. */
	if (bpf_core_enum_value_exists(enum bpf_func_id, BPF_FUNC_get_current_task_btf)) {
		struct mm_struct *mm = bpf_get_current_task_btf()->mm;

		return mm ? mm->exec_vm : 0;
	}
	task = (void *)bpf_get_current_task();
	return BPF_CORE_READ(task, mm, exec_vm);
}

/*
 * The current process's entry in unwind_processes; 0 if there is none that is of
 * any use. `*outdated` tells whether the process has other code mapped since.
 */
static __noinline __u64 unwind_process(__u32 *outdated)
{
	__u32 pid = unwind_process_of_current();
	__u64 *found = bpf_map_lookup_elem(&unwind_processes, &pid);
	__u64 process = found ? *found : 0, head = 0;

	if (process)
		head = unwind_word((__u32)process);
	if ((head & 0xffff) != process >> 48)
		process = 0;
	*outdated = !process || head >> 16 != pages_of_code();
	if (*outdated)
		unwind_ask(pid);
	return process >> 32 & 0xffff ? process : 0;
}

static __noinline int unwind_count_missing(__u32 file)
{
	__u64 zero = 0, *count = value_of(&unwind_missing, &file, &zero);

	if (count)
		__sync_fetch_and_add(count, 1);
	return 0;
}

/*
 * The command that is being started, if it is we who start it. It is stopped
 * whenever it maps code, until user space has the tables for that and lets it
 * go on, so that its very first stacks are complete.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32); /* 1 from where it is stopped until it is let go on */
} unwind_held SEC(".maps");

#define SIGSTOP	  19
#define SYS_MMAP  9
#define PROT_EXEC 4

static __noinline int unwind_hold(__u32 pid)
{
	__u32 *stopped = bpf_map_lookup_elem(&unwind_held, &pid);

	if (!stopped)
		return 0;
	*stopped = 1;
	bpf_send_signal(SIGSTOP);
	bpf_map_delete_elem(&unwind_asked, &pid);
	return unwind_ask(pid);
}

/*
 * The programs that keep `unwind_processes` true between a process's doing and
 * user space's hearing of it. Raw tracepoints: they take no memory of their own.
 */

/* A child has its parent's mappings. */
SEC("raw_tp/sched_process_fork")
int unwind_fork(struct bpf_raw_tracepoint_args *ctx)
{
	struct task_struct *child = (void *)ctx->args[1];
	__u32 pid = unwind_process_of_current(), child_pid;
	__u64 *found, process;

	child_pid = task_ids_in(child, unwind_namespace).pid;
	if (child_pid == pid) /* a thread */
		return 0;
	found = bpf_map_lookup_elem(&unwind_processes, &pid);
	if (found) {
		process = *found;
		bpf_map_update_elem(&unwind_processes, &child_pid, &process, BPF_ANY);
	}
	return 0;
}

/* None of them is left. Whoever had any is likely to be asked about again. */
SEC("raw_tp/sched_process_exec")
int unwind_exec(void *ctx)
{
	__u32 pid = unwind_process_of_current();

	if (!bpf_map_delete_elem(&unwind_processes, &pid)) {
		bpf_map_delete_elem(&unwind_asked, &pid);
		unwind_ask(pid);
	}
	unwind_hold(pid);
	return 0;
}

/* Attached only while a command starts: all system calls come through here. */
SEC("raw_tp/sys_exit")
int unwind_mmap(struct bpf_raw_tracepoint_args *ctx)
{
	struct pt_regs *regs = (struct pt_regs *)ctx->args[0];

	if (BPF_CORE_READ(regs, orig_ax) == SYS_MMAP && BPF_CORE_READ(regs, dx) & PROT_EXEC)
		unwind_hold(unwind_process_of_current());
	return 0;
}

SEC("raw_tp/sched_process_exit")
int unwind_exit(void *ctx)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	__u32 pid;

	if (BPF_CORE_READ(task, signal, live.counter)) /* not the last thread */
		return 0;
	pid = unwind_process_of_current();
	bpf_map_delete_elem(&unwind_processes, &pid);
	bpf_map_delete_elem(&unwind_asked, &pid);
	return 0;
}

#endif /* MEMTOOLS_UNWIND_BPF_H */
