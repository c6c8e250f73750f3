/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Code objects of CPython: the one that a frame executes, and the record that is sent of it.
 *
 * Code objects are freed, and others are made at the same address. A probe on the function that
 * frees them (unwind_code_dies) tells the two apart. A code object is sent to user space in the
 * walk that meets it first (python.bpf.h), so nothing is lost when its process ends.
 */
#ifndef MEMTOOLS_PYTHON_WORD_BPF_H
#define MEMTOOLS_PYTHON_WORD_BPF_H

#include "python_code.bpf.h"
#include "stack_table.bpf.h"
#include "unwind.bpf.h"

/* Option, set before load: whether words have the instruction, for line numbers. */
const volatile __u8 python_lines;

#define PYTHON_PROCESSES 1024
#define PYTHON_FRAMES	 STACK_MAX_DEPTH
#define PYTHON_GROUPS	 48
/* Limits of a walk along a chain: rounds, and frames in a round, also frames that are not noted. */
#define PYTHON_ROUND_STEPS	 32
#define PYTHON_ROUNDS		 16
#define PYTHON_BUCKETS		 4096
#define PYTHON_WAYS		 7
#define PYTHON_CODES_BYTES	 (512 << 10)
#define PYTHON_WINDOW_BYTES	 2048
#define PYTHON_STATE_BYTES	 192 /* of a thread's state, with frame, _PyCFrame and thread */
#define PYTHON_ENTRY_FRAME_BYTES 80
#define PYTHON_TEXT_BYTES	 512  /* copied of a text, at most */
#define PYTHON_LINES_BYTES	 2944 /* copied of a line table, at most: 99 of 100 have fewer */
#define PYTHON_RECORD_BYTES                                                                        \
	(sizeof(struct python_code) + 2 * PYTHON_TEXT_BYTES + PYTHON_LINES_BYTES)
/* Limit of the distance of an entry frame, which is on the C stack, from the stack pointer. */
#define PYTHON_MAX_ENTRY_DISTANCE (16 << 20)
#define PYTHON_KEYS		  32 /* that glibc keeps in the thread's control block */

/*
 * How the frames of a chain mark the calls of the interpreter's loop. An entry frame executes
 * nothing.
 */
enum python_chain {
	PYTHON_ENTRY_FRAMES,  /* 3.12 on: a call begins with an entry frame, in the C frame */
	PYTHON_MARKED_FRAMES, /* 3.11: a call's first frame has a mark; its _PyCFrame is local */
	PYTHON_SINGLE_FRAMES, /* 3.10: each frame is a call of its own; its _PyCFrame is local */
};

/*
 * Layout of CPython in a process that has called exec, as user space has found it. Offsets are in
 * bytes.
 */
struct python_process {
	__s64 state_at;	 /* of the thread's state, from the thread pointer; 0: not known yet */
	__u64 key_at;	 /* 0, or address at which glibc's key of the state will be */
	__u64 code_type; /* address of PyCode_Type */
	__u16 thread;	 /* in a thread's state: the thread pointer */
	__u16 frame;	 /* the current frame; 0: it is in the _PyCFrame */
	__u16 cframe;	 /* the current _PyCFrame; 0: there is none */
	__u16 cframe_frame;
	__u16 cframe_previous;
	__u16 frame_code; /* in a frame */
	__u16 frame_previous;
	__u16 frame_instruction;
	__u16 frame_mark;    /* the byte that marks a call of the loop */
	__u16 frame_bytes;   /* size of a frame, at least */
	__u16 code_bytecode; /* in a code object; 0: the instruction is a number */
	__u16 code_first_line;
	__u16 code_file;
	__u16 code_name;
	__u16 code_lines;
	__u16 text_ascii; /* in a str: ASCII characters */
	__u16 text_other; /* in a str: other characters */
	__u16 bytes;	  /* in a bytes object */
	__u8 mark;	  /* value of frame_mark */
	__u8 chain;	  /* enum python_chain */
	__u8 minor;	  /* of the version, 3.minor */
	__u8 value;	  /* 0; musl: number of the state, from 1, in the table at state_at */
};

/* Layout of CPython in each process, by the `layout` of unwind_space(). */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, PYTHON_PROCESSES);
	__type(key, __u64);
	__type(value, struct python_process);
} python_processes SEC(".maps");

/*
 * Words of the code objects that were sent. When a code object is freed, the generation of its
 * bucket is incremented, so that the next code object at the address gets another word. The words
 * of other code objects in the bucket stay.
 */
struct python_bucket {
	__u64 generation;
	struct {
		__u64 check; /* the code object's hash, xor the word: never fits half written */
		__u64 word;
	} ways[PYTHON_WAYS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, PYTHON_BUCKETS);
	__type(key, __u32);
	__type(value, struct python_bucket);
} python_buckets SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, PYTHON_CODES_BYTES);
} python_codes SEC(".maps");

/* Walk through the frames of a thread. It belongs to the holder of the stack slot. */
struct python_slot {
	struct python_process process;
	__u64 identity; /* of the process; a later process with the same PID has another */
	__u64 sp;
	__u64 frame;
	__u64 cframe;
	__u64 next_anchor; /* anchor of the next group to be added; 0: none */
	__u64 window_at;
	__u32 window_bytes; /* 0: nothing was read */
	__u32 words;
	__u32 groups;
	__u32 group; /* number of the next group to be added */
	__u32 due;   /* end of the words that are due to be added */
	__u32 done;  /* words that were added to the stack */
	__u32 cut;   /* 1: there are further frames */
	__u64 anchors[PYTHON_GROUPS];
	__u32 ends[PYTHON_GROUPS]; /* end of the words of each group */
	__u64 word[PYTHON_FRAMES];
	__u8 near[PYTHON_STATE_BYTES]; /* what is read without changing the window */
	union {
		__u8 window[PYTHON_WINDOW_BYTES];
		__u8 record[PYTHON_RECORD_BYTES];
	};
};

/* Python walks, by the number of the stack slot. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1); /* src/stacks/slots.rs sets the number */
	__type(key, __u32);
	__type(value, struct python_slot);
} python_slots SEC(".maps");

static __always_inline __u64 python_mix(__u64 hash, __u64 value)
{
	hash = (hash ^ value) * 0x9e3779b97f4a7c15ULL;
	return hash ^ hash >> 29;
}

/*
 * Returns a number that identifies the current process from one exec to the next. PIDs are reused.
 */
static __noinline __u64 python_identity(void)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	__u64 hash = bpf_get_current_pid_tgid() >> 32;

	hash = python_mix(hash, BPF_CORE_READ(task, group_leader, start_time));
	return python_mix(hash, BPF_CORE_READ(task, self_exec_id));
}

/* Returns the word at offset `field` of the frame that is at `at` in the window. */
static __always_inline __u64 python_field(struct python_slot *slot, __u64 at, __u64 field)
{
	__u64 offset = at + field;

	barrier_var(offset);
	if (offset > PYTHON_WINDOW_BYTES - 8)
		return 0;
	return *(__u64 *)(slot->window + offset);
}

/* Returns the word at offset `field` of what was read into `near`. */
static __always_inline __u64 python_scratch_word(struct python_slot *slot, __u64 field)
{
	barrier_var(field);
	if (field > PYTHON_STATE_BYTES - 8)
		return 0;
	return *(__u64 *)(slot->near + field);
}

/* Appends up to `most` bytes of the process to the record. Returns the number of bytes. */
static __always_inline __u32 python_copy(struct python_slot *slot, __u64 used, __u64 at,
					 __u64 length, const __u64 most)
{
	barrier_var(used);
	if (used > PYTHON_RECORD_BYTES - most)
		return 0;
	barrier_var(length);
	if (length > most)
		length = most;
	if (!at || bpf_probe_read_user(slot->record + used, length, (void *)at))
		return 0;
	return length;
}

/*
 * Returns the address of the characters of a str. Sets `length` to their bytes, `character` to the
 * bytes of each.
 */
static __noinline __u64 python_text(struct python_slot *slot, __u64 text, __u32 *length,
				    __u8 *character)
{
	__u64 state, characters;

	*length = 0;
	*character = 1;
	/* length, hash, state */
	if (!text || bpf_probe_read_user(slot->near, 24, (void *)(text + 16)))
		return 0;
	characters = python_scratch_word(slot, 0);
	state = python_scratch_word(slot, 16);
	if (!(state & 0x40))
		*character = state >> 2 & 7;
	*length = characters >> 29 ? 0 : characters * *character;
	return text + (state & 0x40 ? slot->process.text_ascii : slot->process.text_other);
}

static __always_inline __u64 python_pointer(__u64 at)
{
	__u64 pointer = 0;

	bpf_probe_read_user(&pointer, sizeof(pointer), (void *)at);
	return pointer;
}

/* Fills in the addresses and lengths of the parts of a code object. */
static __always_inline void python_describe(struct python_slot *slot, __u64 code)
{
	struct python_code *record = (void *)slot->record;
	const struct python_process *process = &slot->process;

	record->address = code;
	record->file_at = python_text(slot, python_pointer(code + process->code_file),
				      &record->file_length, &record->file_kind);
	record->name_at = python_text(slot, python_pointer(code + process->code_name),
				      &record->name_length, &record->name_kind);
	record->lines_at = python_pointer(code + process->code_lines);
	record->lines_length = record->lines_at ? python_pointer(record->lines_at + 16) : 0;
	record->lines_at += process->bytes;
	record->first_line = python_pointer(code + process->code_first_line);
	record->minor = process->minor;
}

/*
 * Sends a code object. Returns whether the ring buffer has taken it. The record overwrites the
 * window.
 */
static __always_inline int python_send(struct python_slot *slot, __u64 word, __u64 code)
{
	struct python_code *record = (void *)slot->record;
	__u64 used = sizeof(*record);

	slot->window_bytes = 0;
	__builtin_memset(record, 0, sizeof(*record));
	record->word = word;
	record->pid = unwind_process_of_current();
	python_describe(slot, code);
	record->file_bytes =
	    python_copy(slot, used, record->file_at, record->file_length, PYTHON_TEXT_BYTES);
	used += record->file_bytes;
	record->name_bytes =
	    python_copy(slot, used, record->name_at, record->name_length, PYTHON_TEXT_BYTES);
	used += record->name_bytes;
	record->lines_bytes =
	    python_copy(slot, used, record->lines_at, record->lines_length, PYTHON_LINES_BYTES);
	used += record->lines_bytes;
	barrier_var(used);
	if (used > PYTHON_RECORD_BYTES)
		return 0;
	return !bpf_ringbuf_output(&python_codes, record, used, 0);
}

/* Stores a code object's word, in an empty way or instead of another. */
static __always_inline void python_keep(struct python_bucket *bucket, __u64 key, __u64 word)
{
	__u64 way = (bpf_ktime_get_ns() >> 4) % PYTHON_WAYS;

	for (int i = 0; i < PYTHON_WAYS; i++)
		if (!bucket->ways[i].word) {
			way = i;
			break;
		}
	barrier_var(way);
	if (way >= PYTHON_WAYS)
		return;
	bucket->ways[way].check = key ^ word;
	bucket->ways[way].word = word;
}

/*
 * Makes a word for a code object that has none, and sends the code object. Returns 0 if `code` is
 * not a code object. If the ring buffer is full, the code object is sent the next time.
 */
static __noinline __u64 python_introduce(struct python_slot *slot, struct python_bucket *bucket,
					 __u64 key, __u64 code)
{
	__u64 word = python_mix(key, bucket->generation) >> 21;

	if (python_pointer(code + 8) != slot->process.code_type)
		return 0;
	word = PYTHON_WORD | (word ?: 1) << PYTHON_INSTRUCTION_BITS;
	if (python_send(slot, word, code)) {
		/* clang 19 would keep the word on the stack, which then has more than 48 bytes. */
		word = *(volatile __u64 *)&((struct python_code *)slot->record)->word;
		python_keep(bucket, key, word);
	}
	return *(volatile __u64 *)&((struct python_code *)slot->record)->word;
}

static __always_inline struct python_bucket *python_bucket_of(__u64 key)
{
	__u32 number = key % PYTHON_BUCKETS;

	return bpf_map_lookup_elem(&python_buckets, &number);
}

/*
 * Returns the word of a code object, with instruction 0. Returns 0 if `code` is not a code object.
 */
static __always_inline __u64 python_word(struct python_slot *slot, __u64 code)
{
	__u64 key = python_mix(slot->identity, code), word;
	struct python_bucket *bucket = python_bucket_of(key);

	if (!bucket)
		return 0;
	for (int i = 0; i < PYTHON_WAYS; i++) {
		word = *(volatile __u64 *)&bucket->ways[i].word;
		if ((*(volatile __u64 *)&bucket->ways[i].check ^ word) == key)
			return word;
	}
	return python_introduce(slot, bucket, key, code);
}

/*
 * Removes the word of a code object that is freed, as the next object at its address is another
 * one. Attached to code_dealloc() as two programs, as the kernel skips one while it is running on
 * the same CPU.
 */
static __noinline int python_forget(__u64 code)
{
	__u64 key = python_mix(python_identity(), code), word;
	struct python_bucket *bucket = python_bucket_of(key);

	if (!bucket)
		return 0;
	__sync_fetch_and_add(&bucket->generation, 1);
	for (int i = 0; i < PYTHON_WAYS; i++) {
		word = *(volatile __u64 *)&bucket->ways[i].word;
		if ((*(volatile __u64 *)&bucket->ways[i].check ^ word) == key) {
			*(volatile __u64 *)&bucket->ways[i].check = 0;
			*(volatile __u64 *)&bucket->ways[i].word = 0;
		}
	}
	return 0;
}

SEC("uprobe.multi")
int unwind_code_dies(struct pt_regs *ctx)
{
	return python_forget(PT_REGS_PARM1(ctx));
}

SEC("uprobe")
int unwind_code_dies_too(struct pt_regs *ctx)
{
	return python_forget(PT_REGS_PARM1(ctx));
}

#endif /* MEMTOOLS_PYTHON_WORD_BPF_H */
