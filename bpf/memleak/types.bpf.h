/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Types and maps of memleak's programs: signatures of probed functions, calls that threads are in,
 * events, and sums.
 */
#ifndef MEMTOOLS_MEMLEAK_TYPES_BPF_H
#define MEMTOOLS_MEMLEAK_TYPES_BPF_H

#include "cgroup_path.bpf.h"
#include "event.bpf.h"
#include "filter.bpf.h"
#include "stack.bpf.h"
#include "live.bpf.h"

/* Operation of a probed function. */
enum function_kind {
	FUNCTION_ALLOCATE,
	FUNCTION_FREE,
	FUNCTION_MAP,
	FUNCTION_UNMAP,
	FUNCTION_REMAP,
	FUNCTION_NEW_POOL, /* makes a pool of CPython's, and returns the pool's first slot */
	/* Not functions, but copies of CPython's allocator in functions: memleak/slots.bpf.h. */
	FUNCTION_TAKE_SLOT,
	FUNCTION_GIVE_BACK_SLOT,
};

/*
 * Layout of a signature, by which a call of a probed function is read. Each field has 4 bits: the
 * kind of the function, flags, and for each value named here the number of the argument that holds
 * it, from 1 (0: none). tools/memleak/processes/signature.rs packs signatures.
 */
enum signature_shift {
	SIGNATURE_KIND = 0,
	SIGNATURE_SIZE = 4, /* bytes, or bytes of each of the count */
	SIGNATURE_COUNT = 8,
	SIGNATURE_ADDRESS = 12, /* the block that the call frees, resizes or unmaps */
	SIGNATURE_RESULT = 16,	/* where the call stores the new block, and returns an errno */
	SIGNATURE_WRAPS = 20,	/* 1 if the function may call another probed function that frees */
	/* Registers at a copy of CPython's allocator, by their numbers in instructions. */
	SIGNATURE_POOL = 12, /* the address of the pool's header */
	SIGNATURE_SLOT = 16,
	SIGNATURE_SLOT_HELD = 20, /* 1 if a register has the slot, 0 if the header has */
};
EXPORT_TYPE(enum signature_shift);

/* Flags of mmap and mremap, whose arguments are the same everywhere. */
#define MAP_FIXED	 0x10
#define MREMAP_FIXED	 2
#define MREMAP_DONTUNMAP 4

#define SIGNATURES 60

/* Size and alignment of CPython's pools since 3.10, and offsets in the header of a pool. */
#define POOL_BYTES	16384ULL
#define POOL_FREE_BLOCK 8
#define POOL_SIZE_CLASS 36 /* bytes of a slot / SLOT_STEP - 1 */
#define SLOT_STEP	16
#define SIZE_CLASSES	32

/*
 * Distance before and behind a function that frees, in bytes, in which only the allocator's own
 * code is.
 */
#define BESIDE_FREE 4096ULL

enum event_kind {
	EVENT_MAP,	     /* [address, address + size) was mapped by the caller in `stack` */
	EVENT_MAP_IGNORED,   /* as EVENT_MAP, but the options exclude it */
	EVENT_UNMAP,	     /* [address, address + size) is about to be unmapped */
	EVENT_UNMAP_FAILED,  /* the last EVENT_UNMAP of this thread did not happen */
	EVENT_EXEC,	     /* the process has called exec; its number of execs is in `size` */
	EVENT_EXIT,	     /* the last thread of the process has ended */
	EVENT_FREED_TWICE,   /* the address was freed and not allocated since */
	EVENT_MOVED,	     /* the process is in another cgroup, of any hierarchy */
	EVENT_CODE_REPLACED, /* the process is stopped before it replaces code in this range */
	EVENT_OVERFLOW_FULL, /* live blocks need another map soon */
	EVENT_ALLOC_ENTER,   /* --trace only, as the next two */
	EVENT_ALLOC_EXIT,
	EVENT_FREE_ENTER,
};

struct event {
	__u64 time_ns; /* CLOCK_MONOTONIC */
	__u64 address;
	__u64 size; /* bytes */
	__u64 stack;
	__u64 cgroup; /* see cgroup_of_current() */
	__u32 pid;
	__u32 tid;
	enum event_kind kind;
	__u32 level; /* sampling level at which it was recorded */
	char comm[16];
};
EXPORT_TYPE(struct event);

/*
 * State of a thread of the target: its outermost call that allocates or maps, and its last one that
 * frees.
 */
struct thread {
	__u64 sp;      /* stack pointer at the call's entry; 0: in no call */
	__u64 size;    /* bytes requested; saturated where the product overflows */
	__u64 address; /* of the old block (realloc) or mapping */
	__u64 result;  /* where the new address will be stored (posix_memalign), or 0 */
	/* Last outermost call of a function that frees and may call another one that frees. */
	__u64 freeing_sp;	  /* stack pointer at its entry; 0: none */
	__u64 freeing_ip;	  /* instruction pointer of the probe */
	__u64 freeing_returns_to; /* its return address */
	__u64 returns_to; /* return address of a call that is not followed to its return; else 0 */
	struct live_block held; /* the old block, until the outcome is known */
	enum function_kind kind;
	__u32 pid;     /* process that its block belongs to; 0: no block */
	__u8 recorded; /* 1: the options match the call */
	__u8 replaces; /* 1: `held` is a block; a mapping is being unmapped; MAP_FIXED */
	__u8 level;    /* sampling level at which that was decided */
	__u8 reserved[5];
};
EXPORT_TYPE(struct thread);

/* Key of the sums by stack: totals with --combined-only and --mode, and unknown frees. */
struct total_key {
	__u64 stack;
	__u32 pid;
	__u32 execs; /* number of execs of its thread and of that thread's ancestors */
};

struct total {
	__u64 bytes;
	__u64 count;
	/*
	 * Values at the peak with the number `peak`. If there was a later peak, `bytes` and `count`
	 * have not changed since that one, and are its values.
	 */
	__u64 bytes_at_peak;
	__u64 count_at_peak;
	__u64 peak;
};

/* Options, set before load. */
const volatile __u64 min_size;
const volatile __u64 max_size = ~0ULL;
const volatile __u32 sample_rate = 1;
const volatile __u32 sample_bytes; /* mean distance between records, in bytes; 0: off */
const volatile __u32 level_bytes;  /* the same at level 0 if levels can be raised, else 0 */
const volatile __u32 signatures[SIGNATURES]; /* of entry_0 and so on */
const volatile __u64 churn_ns;		     /* add up what was freed at a younger age */
const volatile __u8 trace_calls;
const volatile __u8 skips_returns; /* 1: a program can decide at the entry to skip the return */
const volatile __u8 keep_totals;   /* add up live blocks */
const volatile __u8 only_totals;   /* add up allocations, and store no block */
const volatile __u8 count_unknown_frees; /* by stack */
const volatile __u8 follow_peak;	 /* keep totals, and their values at the peak */

/*
 * Runs of the programs on probes, counted by CPU: one word for all CPUs would cost each run a cache
 * miss. CPUs whose numbers are equal modulo HIT_SHARDS share a word, which is why the words are
 * added to atomically.
 */
#define HIT_SHARDS 64
struct hits {
	__u64 count;
	__u64 recorded; /* of these, entries of calls that are to be recorded */
	__u64 measured; /* runs whose time is in `measured_ns` */
	__u64 measured_ns;
	__u64 rest_of_line[4];
} hits[HIT_SHARDS] __attribute__((aligned(64)));

/* Unusual calls of free() and similar functions. */
struct {
	__u64 unknown;	/* of blocks that were not recorded, such as those older than the trace */
	__u64 twice;	/* of blocks that were freed before */
	__u64 replaced; /* that were not seen: the address was allocated again */
} frees;

/*
 * Peak of the outstanding bytes, for --mode peak. Totals are not read at the peak: the next change
 * of a total saves its values first (note_peak()).
 */
struct peak {
	__u64 outstanding; /* bytes now */
	__u64 bytes;	   /* the maximum so far */
	__u64 number;	   /* number of new maxima so far */
	__u64 time_ns;	   /* of the last maximum, CLOCK_MONOTONIC */
	__u64 execs;	   /* execs_of_current() at the last maximum */
} peak;

/* State of each thread, by pid_tgid as bpf_get_current_pid_tgid() returns it. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, __u64);
	__type(value, struct thread);
} threads SEC(".maps");

enum steering {
	STEERING_LEVEL,	   /* the sampling level */
	STEERING_MEASURES, /* 1: runs are timed */
	/*
	 * Time until which calls may have gone unseen, as their probes were being placed:
	 * CLOCK_MONOTONIC in nanoseconds.
	 */
	STEERING_UNSEEN_UNTIL,
	STEERINGS,
};
EXPORT_TYPE(enum steering);

/* Settings that user space changes while the programs run, by enum steering. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, STEERINGS);
	__type(key, __u32);
	__type(value, __u64);
} steering SEC(".maps");

/*
 * Longest duration of a run. A run that seems longer was delayed: a hypervisor ran something else.
 */
#define LONGEST_RUN_NS 1000000

/* Number of sampling levels that fit above BORN_TIME_BITS. */
#define MAX_LEVELS 32

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 16384);
	__type(key, struct total_key);
	__type(value, struct total);
} totals SEC(".maps");

/* Number of frees of blocks that were not recorded, by stack. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 16384);
	__type(key, struct total_key);
	__type(value, __u64);
} unknown_frees SEC(".maps");

/*
 * When a call may last have gone unseen, CLOCK_MONOTONIC: a process of the target made a process
 * that shares its memory, or was moved to another cgroup, or there was no space for a thread.
 */
__u64 unseen_call_ns;

const volatile struct thread no_thread;
const volatile struct total no_total;

#endif /* MEMTOOLS_MEMLEAK_TYPES_BPF_H */
