/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * What memleak's programs keep: of functions that are probed, of calls that threads are
 * in, and sums.
 */
#ifndef MEMTOOLS_MEMLEAK_TYPES_BPF_H
#define MEMTOOLS_MEMLEAK_TYPES_BPF_H

#include "cgroup_path.bpf.h"
#include "event.bpf.h"
#include "filter.bpf.h"
#include "stack.bpf.h"
#include "live.bpf.h"

/* What a probed function does. */
enum function_kind {
	FUNCTION_ALLOCATE,
	FUNCTION_FREE,
	FUNCTION_MAP,
	FUNCTION_UNMAP,
	FUNCTION_REMAP,
};

/*
 * How a call of a probed function is read: 4 bits each for its kind, for the
 * number of the argument, from 1, that has what the shift names (0: none), and
 * for flags. tools/memleak/processes/signature.rs packs it.
 */
enum signature_shift {
	SIGNATURE_KIND = 0,
	SIGNATURE_SIZE = 4, /* bytes, or bytes of each of the count */
	SIGNATURE_COUNT = 8,
	SIGNATURE_ADDRESS = 12, /* the block that it frees, resizes or unmaps */
	SIGNATURE_RESULT = 16,	/* where it stores the new block, and returns an errno */
	SIGNATURE_WRAPS = 20,	/* 1 if it may call another probed function that frees */
};
EXPORT_TYPE(enum signature_shift);

/* mmap, munmap and mremap are what they are everywhere. */
#define MAP_FIXED	 0x10
#define MREMAP_DONTUNMAP 4

#define SIGNATURES 16

/* Bytes before and behind a function that frees, where only the allocator's own code is. */
#define BESIDE_FREE 4096ULL

enum event_kind {
	EVENT_MAP,	    /* [address, address + size) was mapped by the caller in `stack` */
	EVENT_MAP_IGNORED,  /* the same, but the options exclude it */
	EVENT_UNMAP,	    /* it is about to be unmapped */
	EVENT_UNMAP_FAILED, /* the last EVENT_UNMAP of this thread did not happen */
	EVENT_EXEC,	    /* the process is another program; its execs are in `size` */
	EVENT_EXIT,	    /* it is gone, and so is the process */
	EVENT_FREED_TWICE,  /* the address was freed and not allocated since */
	EVENT_CROWDED,	    /* live blocks will want another map soon */
	EVENT_ALLOC_ENTER,  /* --trace only, as the two below */
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
	__u32 level; /* of sampling, at which it was recorded */
	char comm[16];
};
EXPORT_TYPE(struct event);

/* A thread of the target. Its call is the outermost that allocates or maps. */
struct thread {
	__u64 sp;      /* stack pointer at the call's entry; 0: in none */
	__u64 size;    /* bytes asked for; saturated where the product overflows */
	__u64 address; /* of the old block (realloc) or mapping */
	__u64 result;  /* where the new address will be stored (posix_memalign), or 0 */
	/* The last outermost call of a function that frees and may call another that does. */
	__u64 freeing_sp;	  /* stack pointer at its entry; 0: none */
	__u64 freeing_ip;	  /* of the probe */
	__u64 freeing_returns_to; /* its return address */
	__u64 returns_to;	/* of a call that is not followed to its return: to where; else 0 */
	struct live_block held; /* the old block, until the outcome is known */
	enum function_kind kind;
	__u32 pid;     /* the process that its block belongs to; 0: it has none */
	__u8 recorded; /* the options want it */
	__u8 replaces; /* `held` is one; a mapping is being unmapped; MAP_FIXED */
	__u8 level;    /* of sampling, at which that was decided */
	__u8 reserved[5];
};
EXPORT_TYPE(struct thread);

/* By what is added up by stack with --combined-only and --mode, and unknown frees are. */
struct total_key {
	__u64 stack;
	__u32 pid;
	__u32 execs; /* how often its thread or an ancestor of that has called exec */
};

struct total {
	__u64 bytes;
	__u64 count;
	/* As they were at the peak with this number; if that is not the last one, they still are.
	 */
	__u64 bytes_at_peak;
	__u64 count_at_peak;
	__u64 peak;
};

/* Options, set before load. */
const volatile __u64 min_size;
const volatile __u64 max_size = ~0ULL;
const volatile __u32 sample_rate = 1;
const volatile __u32 sample_bytes; /* mean distance between records, 0: off */
const volatile __u32 level_bytes;  /* the same at level 0 if levels can be raised, else 0 */
const volatile __u32 signatures[SIGNATURES]; /* of entry_0 and so on */
const volatile __u64 churn_ns;		     /* add up what was freed at a lesser age */
const volatile __u8 trace_calls;
const volatile __u8 skips_returns; /* a program can tell at entry that it does without the return */
const volatile __u8 keep_totals;   /* add up what is live */
const volatile __u8 only_totals;   /* add up what is allocated, and keep no block */
const volatile __u8 count_unknown_frees; /* by stack */
const volatile __u8 follow_peak;	 /* keep totals, and what they were when they were most */

/*
 * Runs of the programs on probes. CPUs count beside each other: one word for
 * all would cost each run a cache miss. A CPU that has another one's number
 * modulo HIT_SHARDS shares its word, which is why it is added to atomically.
 */
#define HIT_SHARDS 64
struct hits {
	__u64 count;
	__u64 recorded; /* of these, entries of calls that are to be recorded */
	__u64 measured; /* runs whose time is in `measured_ns` */
	__u64 measured_ns;
	__u64 rest_of_line[4];
} hits[HIT_SHARDS] __attribute__((aligned(64)));

/* Calls of free and the like. */
struct {
	__u64 unknown;	/* of what was not recorded, such as what is older than the trace */
	__u64 twice;	/* of what was freed before */
	__u64 replaced; /* that were not seen: the address was allocated again */
} frees;

/*
 * When most was outstanding, for --mode peak. No stack is looked at then: what it
 * had is noted by whoever changes it next.
 */
struct peak {
	__u64 outstanding; /* bytes now */
	__u64 bytes;	   /* the most so far */
	__u64 number;	   /* of times that there were more than ever */
	__u64 time_ns;	   /* of the last one, CLOCK_MONOTONIC */
	__u64 execs;	   /* then */
} peak;

/* By thread, as bpf_get_current_pid_tgid() returns it. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, __u64);
	__type(value, struct thread);
} threads SEC(".maps");

enum steering {
	STEERING_LEVEL,	   /* of sampling */
	STEERING_MEASURES, /* 1: runs are timed */
	STEERINGS,
};
EXPORT_TYPE(enum steering);

/* What user space changes while the programs run. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, STEERINGS);
	__type(key, __u32);
	__type(value, __u32);
} steering SEC(".maps");

/* No run takes so long. One that seems to was held up: a hypervisor ran something else. */
#define LONGEST_RUN_NS 1000000

/* So many fit above BORN_TIME_BITS. */
#define MAX_LEVELS 32

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 16384);
	__type(key, struct total_key);
	__type(value, struct total);
} totals SEC(".maps");

/* How often a stack has freed what was not recorded. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 16384);
	__type(key, struct total_key);
	__type(value, __u64);
} unknown_frees SEC(".maps");

/* When a process of the target last made one that shares its memory, CLOCK_MONOTONIC. */
__u64 shared_memory_ns;

const volatile struct thread no_thread;
const volatile struct total no_total;

#endif /* MEMTOOLS_MEMLEAK_TYPES_BPF_H */
