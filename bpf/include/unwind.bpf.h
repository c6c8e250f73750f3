/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Unwind tables: for every instruction of every file that is executed, the rule by which its caller
 * is found, from .eh_frame.
 *
 * An address is looked up as the kernel does, among the mappings of the process (mapping.bpf.h); a
 * file's rules are found by its inode. So a file whose rules are ready serves every process from
 * its first instruction on, however short its life. User space (src/stacks/unwind) makes the rules
 * of a file once, when a process that was named maps it, or when it is first met here.
 *
 * Rules are words of eight bytes, in shards of one size that are added as they are needed. Nothing
 * that a program can reach is ever changed: a file's entry is deleted, and the words that it refers
 * to are used again after a grace period.
 */
#ifndef MEMTOOLS_UNWIND_BPF_H
#define MEMTOOLS_UNWIND_BPF_H

#include "arch_code.bpf.h"
#include "current_task.bpf.h"
#include "mapping.bpf.h"
#include "stack_table.bpf.h"
#include "task_ids.bpf.h"
#include "unwind_row.bpf.h"

/* Options, set before load. */
enum unwind_mode {
	UNWIND_MODE_FP,	   /* by frame pointers alone */
	UNWIND_MODE_AUTO,  /* by tables; by frame pointers from the first code without tables */
	UNWIND_MODE_DWARF, /* by tables only */
};
const volatile __u8 unwind_mode;
const volatile __u8 interpreters;      /* 1: frames of interpreters are walked */
const volatile __u32 unwind_namespace; /* inode of the tool's PID namespace, 0: the initial one */

enum unwind_layout {
	UNWIND_PAGE_SHIFT = 8, /* of pages of code, by which rows are found */
	UNWIND_SHARD_WORDS = 1 << 18,
	UNWIND_TABLE_LEFT_OUT = 1, /* value of `pages`: the rules did not fit */
	/* Bits of a file's number: */
	UNWIND_SKIPS_BIT = 29,	 /* generated code that calls the file keeps no frame pointers */
	UNWIND_PYTHON_BIT = 30,	 /* the file holds an interpreter of Python */
	UNWIND_HOTSPOT_BIT = 31, /* the file is HotSpot's */
};

#define UNWIND_SHARDS	     128
#define UNWIND_FILES	     4096
#define UNWIND_CACHED	     16384
#define UNWIND_REQUEST_BYTES (16 << 10)
#define UNWIND_ROW_STEPS     10 /* binary search: a row for each byte of a page, and more */
/* Time that user space has for an answer, before it is asked again. */
#define UNWIND_RETRY_NS (20 * 1000000ULL)
/*
 * Jiffies after which the mappings of a process get a new number, as a power of two: one second
 * where HZ is 1000, ten where it is 100.
 */
#define UNWIND_EPOCH_SHIFT 10

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
 * File whose rules user space has looked for. A page's word has the first row (31:0) and the number
 * of rows (63:32) that are valid somewhere in the page.
 */
struct unwind_file {
	__u64 pages;	  /* first word (31:0) and number of words (63:32); 0: there are no rules */
	__u32 first_page; /* number of the first of these pages */
	__u32 number;	  /* of the file, for its name, with the bits above; 0: generated code */
	__u64 used_ns;	  /* CLOCK_MONOTONIC when a rule was last looked for */
};

#define UNWIND_SKIPS   (1U << UNWIND_SKIPS_BIT)
#define UNWIND_PYTHON  (1U << UNWIND_PYTHON_BIT)
#define UNWIND_HOTSPOT (1U << UNWIND_HOTSPOT_BIT)

/* Whether files with Python or HotSpot were met; until then their frames are not looked for. */
__u32 python_met;
__u32 hotspot_met;

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, UNWIND_FILES);
	__type(key, struct mapping_file);
	__type(value, struct unwind_file);
} unwind_files SEC(".maps");

/* Rule that was looked up, cached by a hash of the mappings' number and the address. */
struct unwind_cached {
	__u64 check; /* the hash, xor the row: never fits while half written */
	__u64 row;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, UNWIND_CACHED);
	__type(key, __u32);
	__type(value, struct unwind_cached);
} unwind_cache SEC(".maps");

/* Subject of a request to user space. */
enum unwind_subject {
	UNWIND_SUBJECT_FILE,	/* the file of a mapping */
	UNWIND_SUBJECT_PYTHON,	/* the process's Python; `file` is the process's layout */
	UNWIND_SUBJECT_HOTSPOT, /* the process's HotSpot, likewise */
};

struct unwind_request {
	__u64 file;	 /* hash of its identity; 0: the process is stopped for held_file */
	__u64 held_file; /* hash of a file: look at all that the process has mapped (held.bpf.h) */
	__u64 start;	 /* of the mapping */
	__u64 end;
	__u32 pid;
	__u32 subject; /* enum unwind_subject */
};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, UNWIND_REQUEST_BYTES);
} unwind_requests SEC(".maps");

/* Time (CLOCK_MONOTONIC) before which user space is not asked again, by hash of the file. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, __u64);
} unwind_asked SEC(".maps");

/* Number of stacks that have ended in a file for lack of a rule, by the file's number. */
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

/*
 * Returns the word with this number; 0 if there is none. Global, so that the verifier follows the
 * function once.
 */
__noinline __u64 unwind_read(__u64 number)
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
 * Returns the number of the last row that begins no later than `address`, among `count` rows from
 * `first` on, in ascending order. 0: none. Global, so that the verifier follows the function once:
 * scalars in, scalars out.
 */
__noinline __u64 unwind_search(__u64 first, __u64 count, __u64 address)
{
	__u64 low = first, high = first + count;

	for (int i = 0; i < UNWIND_ROW_STEPS; i++) {
		__u64 middle = (low + high) / 2;

		if (low >= high)
			break;
		if (unwind_read(middle) >> 32 <= address)
			low = middle + 1;
		else
			high = middle;
	}
	return low > first ? low - 1 : 0;
}

/*
 * Mapping that was found last (mapping.bpf.h), with the entry of its file: callers are often in the
 * same mapping.
 */
struct unwind_place {
	__u64 space; /* number of the process's mappings, from unwind_space(); 0: none */
	__u64 start; /* of the mapping */
	__u64 end;
	__u64 base;
	struct unwind_file file;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* src/stacks/slots.rs sets the number */
	__type(key, __u32);
	__type(value, struct unwind_place);
} unwind_places SEC(".maps");

/* Whether user space may be asked about `hash`: it was not asked just now. Notes the time. */
static __always_inline int unwind_may_request(__u64 hash)
{
	__u64 now = bpf_ktime_get_ns(), *not_before = bpf_map_lookup_elem(&unwind_asked, &hash);

	if (not_before && now < *not_before)
		return 0;
	now += UNWIND_RETRY_NS;
	bpf_map_update_elem(&unwind_asked, &hash, &now, BPF_ANY);
	return 1;
}

/* Asks user space to look at the mapping that was found last, unless it was asked just now. */
static __noinline int unwind_request_file(__u32 index)
{
	struct mapping *mapping = bpf_map_lookup_elem(&mappings, &index);
	struct unwind_request *request;
	__u64 file;

	if (!mapping)
		return 0;
	file = mapping_file_hash(&mapping->file);
	if (!unwind_may_request(file))
		return 0;
	request = bpf_ringbuf_reserve(&unwind_requests, sizeof(*request), 0);
	if (!request)
		return 0;
	request->file = file;
	request->held_file = 0;
	request->start = mapping->start;
	request->end = mapping->end;
	request->pid = unwind_process_of_current();
	request->subject = UNWIND_SUBJECT_FILE;
	bpf_ringbuf_submit(request, 0);
	return 0;
}

/*
 * Asks user space to look for this interpreter in the current process, of this layout, unless it
 * was asked just now; `hash` tells the requests for each interpreter apart.
 */
static __always_inline int unwind_request_interpreter(__u64 layout, __u64 hash, __u32 interpreter)
{
	struct unwind_request *request;

	if (!unwind_may_request(hash))
		return 0;
	request = bpf_ringbuf_reserve(&unwind_requests, sizeof(*request), 0);
	if (!request)
		return 0;
	__builtin_memset(request, 0, sizeof(*request));
	request->file = layout;
	request->pid = unwind_process_of_current();
	request->subject = interpreter;
	bpf_ringbuf_submit(request, 0);
	return 0;
}

/*
 * Finds the mapping that contains `pc`, and the entry of its file. Returns 0, or a row that says
 * why they are missing.
 */
__noinline __u64 unwind_locate(__u64 space, __u64 pc, __u32 index)
{
	struct unwind_place *place = bpf_map_lookup_elem(&unwind_places, &index);
	struct mapping *mapping = mapping_find(index, pc);
	struct unwind_file *file;

	if (!place || !mapping || !mapping->executable)
		return UNWIND_NO_CODE;
	place->space = 0;
	place->start = mapping->start;
	place->end = mapping->end;
	place->base = mapping->base;
	if (mapping->file.inode) {
		file = bpf_map_lookup_elem(&unwind_files, &mapping->file);
		if (!file)
			return UNWIND_NO_TABLE;
		file->used_ns = bpf_ktime_get_ns();
		place->file = *file;
	} else {
		__builtin_memset(&place->file, 0, sizeof(place->file));
	}
	place->space = space;
	return 0;
}

/* Returns the rule of a file for the byte at `offset`. */
static __always_inline __u64 unwind_rule(const struct unwind_file *file, __u64 offset)
{
	__u64 number = row_of_file(file->number), pages = file->pages;
	__u64 page = (offset >> UNWIND_PAGE_SHIFT) - file->first_page, row;

	if (pages == UNWIND_TABLE_LEFT_OUT)
		return number | UNWIND_NO_ROOM;
	if (page >= pages >> 32)
		return number | UNWIND_NO_RULE;
	row = unwind_read((__u32)pages + page);
	row = unwind_search((__u32)row, row >> 32, offset);
	return number | (row ? (__u32)unwind_read(row) : UNWIND_NO_RULE);
}

/* Returns the row, corrected by the machine code at the address. */
static __noinline __u64 unwind_correct_row(__u64 row, __u64 at)
{
	__u64 pc = (at + 1) >> 1;

	if (row_kind(row) == UNWIND_NO_RULE && code_is_sigreturn(pc))
		row |= UNWIND_SIGNAL;
	/* Generated code may return in any way: it is not checked. */
	if (!(at & 1) && row_file(row) && row_kind(row) != UNWIND_SIGNAL &&
	    !code_call_returns_to(pc))
		row = row_of_file(row_file(row)) | UNWIND_FIBER_END;
	return row;
}

static __always_inline __u64 unwind_find(__u64 space, __u64 at, __u32 index)
{
	struct unwind_place *place = bpf_map_lookup_elem(&unwind_places, &index);
	/* A call can be the last instruction of its function: its last byte is looked up. */
	__u64 row, address = (at - 1) >> 1;

	if (!place)
		return UNWIND_NO_CODE;
	if (place->space != space || address < place->start || address >= place->end) {
		row = unwind_locate(space, address, index);
		if (row)
			return row;
	}
	return unwind_correct_row(unwind_rule(&place->file, address - place->base), at);
}

/*
 * Returns the rule for an address of the current process, and the number of its file. `at` is twice
 * the address, and one more if the address is no return address.
 */
__noinline __u64 unwind_row(__u64 space, __u64 at, __u32 index)
{
	__u64 key = (at ^ space * 0x9e3779b97f4a7c15ULL) * 0xd6e8feb86659fd93ULL;
	__u32 number = key >> 50; /* 14 bits: less than UNWIND_CACHED */
	volatile struct unwind_cached *cached = bpf_map_lookup_elem(&unwind_cache, &number);
	__u64 row, kind;

	if (!cached)
		return UNWIND_NO_CODE;
	row = cached->row;
	if ((cached->check ^ row) == key)
		return row;
	row = unwind_find(space, at, index);
	kind = row_kind(row);
	if (kind != UNWIND_NO_CODE && kind != UNWIND_NO_TABLE) {
		cached->check = key ^ row;
		cached->row = row;
	}
	return row;
}

/*
 * Returns a number for the mappings of the current process; 0 for a kernel thread. The number
 * changes whenever the process calls exec or has more or less code mapped. It also changes from
 * time to time, in case other code of the same size was mapped instead. `layout` becomes a number
 * for the addresses where exec has put the program: children that have not called exec have the
 * same.
 */
static __noinline __u64 unwind_space(__u64 *layout)
{
	__u64 process = bpf_get_current_pid_tgid() >> 32, epoch;
	__u64 pages, stack, code, data;

	epoch = bpf_jiffies64() >> UNWIND_EPOCH_SHIFT;
	if (has_current_task_btf()) {
		struct mm_struct *mm = bpf_get_current_task_btf()->mm;

		if (!mm)
			return 0;
		pages = mm->exec_vm;
		stack = mm->start_stack;
		code = mm->end_code;
		data = mm->start_data;
	} else {
		struct task_struct *task = (void *)bpf_get_current_task();
		struct mm_struct *mm = BPF_CORE_READ(task, mm);

		if (!mm)
			return 0;
		pages = BPF_CORE_READ(mm, exec_vm);
		stack = BPF_CORE_READ(mm, start_stack);
		code = BPF_CORE_READ(mm, end_code);
		data = BPF_CORE_READ(mm, start_data);
	}
	stack = (stack ^ code) * 0x9e3779b97f4a7c15ULL;
	*layout = stack ^ data;
	stack ^= data + pages;
	return (stack ^ (process << 32 | (__u32)epoch)) * 0xd6e8feb86659fd93ULL | 1;
}

static __noinline int unwind_count_missing(__u32 file)
{
	__u64 zero = 0, *count = value_of(&unwind_missing, &file, &zero);

	if (count)
		__sync_fetch_and_add(count, 1);
	return 0;
}

/*
 * Publishes the rules of a file. User space has mapped the file, runs this program, and passes an
 * address of the mapping. So the entry is for the file that was read, whatever is at its path by
 * now. Returns 0; 1 if no file is mapped there, 2 if the map is full.
 */
SEC("raw_tp")
int unwind_publish(struct bpf_raw_tracepoint_args *ctx)
{
	struct mapping *mapping = mapping_find(stack_slot_count, ctx->args[0]);
	struct unwind_file file = {
		.pages = ctx->args[1],
		.first_page = ctx->args[2],
		.number = ctx->args[2] >> 32,
		.used_ns = bpf_ktime_get_ns(),
	};
	struct unwind_file *known;

	if (!mapping || !mapping->file.inode)
		return 1;
	/*
	 * The file was requested once more meanwhile. To replace an entry would give its memory to
	 * the next one, while a program that has found the entry may still be reading.
	 */
	known = bpf_map_lookup_elem(&unwind_files, &mapping->file);
	if (known && known->pages == file.pages && known->number == file.number)
		return 0;
	if (file.number & UNWIND_PYTHON)
		python_met = 1;
	if (file.number & UNWIND_HOTSPOT)
		hotspot_met = 1;
	return bpf_map_update_elem(&unwind_files, &mapping->file, &file, BPF_ANY) ? 2 : 0;
}

#endif /* MEMTOOLS_UNWIND_BPF_H */
