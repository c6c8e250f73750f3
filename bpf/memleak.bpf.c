// SPDX-License-Identifier: BSD-2-Clause
/*
 * memleak: memory that processes allocated and did not free, by call stack.
 *
 * Hooks: uprobes on the target's functions that allocate and map (entry and
 * return) and that free (entry); sched_process_fork, sched_process_exec and
 * sched_process_exit.
 *
 * Live blocks are in the maps of live.bpf.h. Mappings (mmap, munmap, mremap)
 * can be unmapped in part, which takes an ordered map: they go to user space as
 * events, in order, and are kept there.
 *
 * The handlers are attached in three ways, from the best down; tools/memleak/
 * probes.rs chooses: one uprobe session link for all functions of a file, with
 * their signatures in its cookies (6.13 and later); a perf uprobe for each
 * entry and return, with cookies (5.15); the same with a program for each
 * signature, entry_0 to entry_15, and all blocks in a hash map.
 */
#include "cgroup_path.bpf.h"
#include "event.bpf.h"
#include "filter.bpf.h"
#include "stack.bpf.h"

/* How many processes that wait for each other's vfork() are looked through. */
#define VFORKS 4

/* The process whose memory a child of vfork() uses until it calls exec or exits. */
static __noinline __u32 process_that_vforked(void)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task();

	for (int i = 0; i < VFORKS && BPF_CORE_READ(task, vfork_done); i++) {
		struct task_struct *parent = BPF_CORE_READ(task, real_parent);

		if (BPF_CORE_READ(parent, mm) != BPF_CORE_READ(task, mm))
			break;
		task = parent;
	}
	return ids_of(task).pid;
}

/*
 * The process that a block belongs to, in the tool's PID namespace: the first one
 * with this address space. Not inline, for the callers' stacks.
 */
static __noinline __u32 process_of_current(void)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task();

	if (BPF_CORE_READ(task, vfork_done))
		return process_that_vforked();
	return ids_of_current().pid;
}

#include "live.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

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
	__u8 recorded; /* the options want it */
	__u8 replaces; /* `held` is one; a mapping is being unmapped; MAP_FIXED */
	__u8 level;    /* of sampling, at which that was decided */
	__u8 reserved;
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

static __always_inline struct hits *hits_of_cpu(void)
{
	return &hits[bpf_get_smp_processor_id() % HIT_SHARDS];
}

static __always_inline void count_hit(void)
{
	__sync_fetch_and_add(&hits_of_cpu()->count, 1);
}

/*
 * A run that is timed: when it began, and below that how often its task had lost the
 * CPU by then. The kernel's own statistics count the time in which a program is
 * preempted, too: on a busy machine 862 % of the CPU time that the target had. In one
 * number, for the stacks of the programs (tests/e2e/load.rs).
 */
#define SWITCHES_BITS 16

static __always_inline __u64 timing_now(void)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task();
	__u16 switches = BPF_CORE_READ(task, nivcsw);

	return bpf_ktime_get_ns() << SWITCHES_BITS | switches;
}

/* Returns 0 if this run is not timed. */
static __noinline __u64 timing_start(void)
{
	__u32 key = STEERING_MEASURES, *measures = bpf_map_lookup_elem(&steering, &key);

	return measures && *measures ? timing_now() : 0;
}

static __noinline int timing_end(__u64 start)
{
	__u64 now, ns;

	if (!start)
		return 0;
	now = timing_now();
	ns = (now - start) >> SWITCHES_BITS;
	if (ns > LONGEST_RUN_NS || (__u16)now != (__u16)start)
		return 0;
	__sync_fetch_and_add(&hits_of_cpu()->measured, 1);
	__sync_fetch_and_add(&hits_of_cpu()->measured_ns, ns);
	return 0;
}

/* The level at which user space wants to have it sampled now. */
static __noinline __u32 current_level(void)
{
	__u32 key = STEERING_LEVEL, *level;

	if (!level_bytes)
		return 0;
	level = bpf_map_lookup_elem(&steering, &key);
	return level ? *level % MAX_LEVELS : 0;
}

/* The mean distance between records; tools/memleak/sampling.rs has the same. */
static __always_inline __u64 distance(__u32 level)
{
	return level ? (__u64)level_bytes << level : sample_bytes;
}

static __noinline bool wanted(__u64 size, __u32 level)
{
	__u64 bytes = distance(level);

	if (size < min_size || size > max_size)
		return false;
	/* With a probability in proportion to the size; tools/memleak/sampling.rs counts on it. */
	if (size < bytes)
		return bpf_get_prandom_u32() < (size << 32) / bytes;
	return sample_rate <= 1 || bpf_get_prandom_u32() % sample_rate == 0;
}

/* calloc's and reallocarray's size. They fail by themselves where it overflows. */
static __always_inline __u64 product(__u64 count, __u64 size)
{
	__u64 limit = count ? ~0ULL / count : ~0ULL;

	/* Else clang makes it a 128-bit multiplication, which BPF has not. */
	barrier_var(limit);
	return size > limit ? ~0ULL : count * size;
}

static __always_inline __u32 field(__u64 signature, __u32 shift)
{
	return signature >> shift & 15;
}

/* The argument with this number. Registers are read at constant offsets, as the verifier wants. */
static __noinline __u64 argument(struct pt_regs *ctx, __u32 number)
{
	__u64 value = 0;

	if (number == 1)
		value = PT_REGS_PARM1(ctx);
	barrier_var(value);
	if (number == 2)
		value = PT_REGS_PARM2(ctx);
	barrier_var(value);
	if (number == 3)
		value = PT_REGS_PARM3(ctx);
	barrier_var(value);
	if (number == 4)
		value = PT_REGS_PARM4(ctx);
	barrier_var(value);
	if (number == 5)
		value = PT_REGS_PARM5(ctx);
	barrier_var(value);
	if (number == 6)
		value = PT_REGS_PARM6(ctx);
	return value;
}

/* Execs and exits are of the child of a vfork() itself. */
static __noinline __u32 process_of_event(__u32 kind)
{
	if (kind == EVENT_EXEC || kind == EVENT_EXIT)
		return ids_of_current().pid;
	return process_of_current();
}

/* Not inline, for the callers' stacks. */
static __noinline __u32 tid_of_current(void)
{
	return ids_of_current().tid;
}

/* As tid_of_current(). */
static __noinline __u64 cgroup_of_event(void)
{
	return cgroup_of_current();
}

static __noinline int emit_sampled(__u32 kind, __u64 address, __u64 size, __u64 stack, __u32 level)
{
	struct event *event = event_reserve(sizeof(*event));

	if (!event)
		return 0;
	event->time_ns = bpf_ktime_get_ns();
	event->address = address;
	event->size = size;
	event->stack = stack;
	event->pid = process_of_event(kind);
	event->tid = tid_of_current();
	event->kind = kind;
	event->level = level;
	event->cgroup = cgroup_of_event();
	bpf_get_current_comm(event->comm, sizeof(event->comm));
	bpf_ringbuf_submit(event, 0);
	return 0;
}

static __always_inline int emit(__u32 kind, __u64 address, __u64 size, __u64 stack)
{
	return emit_sampled(kind, address, size, stack, 0);
}

static int ask_for_room(void)
{
	return emit(EVENT_CROWDED, 0, 0, 0);
}

static __always_inline __u32 execs_of_current(void)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task();

	return BPF_CORE_READ(task, self_exec_id);
}

static __always_inline struct total_key total_key_of(__u64 stack)
{
	return (struct total_key){
		.stack = stack,
		.pid = process_of_current(),
		.execs = execs_of_current(),
	};
}

/* A total is about to change. */
static __always_inline void note_peak(struct total *total)
{
	if (!follow_peak || total->peak == peak.number)
		return;
	total->bytes_at_peak = total->bytes;
	total->count_at_peak = total->count;
	total->peak = peak.number;
}

/* It has changed. */
static __always_inline void outstanding_changes(__u64 bytes)
{
	if (!follow_peak)
		return;
	__sync_fetch_and_add(&peak.outstanding, bytes);
	if (peak.outstanding <= peak.bytes)
		return;
	peak.bytes = peak.outstanding;
	peak.time_ns = bpf_ktime_get_ns();
	peak.execs = execs_of_current();
	__sync_fetch_and_add(&peak.number, 1);
}

static __noinline int total_add(__u64 stack, __u64 bytes)
{
	struct total_key key = total_key_of(stack);
	struct total *total = value_of(&totals, &key, (const void *)&no_total);

	if (!total) {
		count_loss(entries);
		return 0;
	}
	note_peak(total);
	__sync_fetch_and_add(&total->bytes, bytes);
	__sync_fetch_and_add(&total->count, 1);
	outstanding_changes(bytes);
	return 0;
}

static __noinline int total_subtract(__u64 stack, __u64 bytes)
{
	struct total_key key = total_key_of(stack);
	struct total *total = bpf_map_lookup_elem(&totals, &key);

	if (total) {
		note_peak(total);
		__sync_fetch_and_add(&total->bytes, -bytes);
		__sync_fetch_and_add(&total->count, -1);
		outstanding_changes(-bytes);
	}
	return 0;
}

static __noinline int unknown_free_by(__u64 stack)
{
	struct total_key key = total_key_of(stack);
	__u64 zero = 0, *count = value_of(&unknown_frees, &key, &zero);

	if (!count) {
		count_loss(entries);
		return 0;
	}
	__sync_fetch_and_add(count, 1);
	return 0;
}

/* A block has left the live ones. */
static __always_inline void block_freed(const struct live_block *block)
{
	if (keep_totals)
		total_subtract(block->stack, block->size);
	if (churn_ns && bpf_ktime_get_ns() - (block->born & BORN_TIME) < churn_ns)
		total_add(block->stack, block->size);
}

static __always_inline void block_allocated(__u64 address, const struct thread *thread, __u64 stack,
					    bool use_table)
{
	__u64 born, size = thread->size;
	struct live_block old = {};

	if (only_totals) {
		total_add(stack, size);
		return;
	}
	if (live_take(address, &old, use_table) == LIVE_FOUND) {
		__sync_fetch_and_add(&frees.replaced, 1);
		if (keep_totals)
			total_subtract(old.stack, old.size);
	}
	born = bpf_ktime_get_ns() | (__u64)thread->level << BORN_TIME_BITS;
	if (live_put(address, size, stack, born, use_table) && keep_totals)
		total_add(stack, size);
}

/*
 * Whether a call, which had this stack pointer at its entry, is still going on,
 * although its return is not seen. Then its return address is on the stack, or
 * where a return probe has put it. Both can be true for long after it: of a caller
 * that takes its next frames below (alloca). So the stack is walked up to there.
 */
static __always_inline int goes_on(struct pt_regs *ctx, __u64 call_sp, __u64 returns_to)
{
	__u64 sp = PT_REGS_SP(ctx), found = 0;

	barrier_var(sp);
	bpf_probe_read_user(&found, sizeof(found), (void *)call_sp);
	if (found != returns_to && stack_of_return_probes(call_sp) != returns_to)
		return 0;
	return stack_comes_from(stack_return_address(ctx), stack_pointer_after_return(sp),
				PT_REGS_FP(ctx), call_sp);
}

/*
 * A call made by the allocator itself, such as the mmap of a large malloc: its
 * stack pointer is below that of the outer call. A record that is not below
 * was left behind by a call that never returned (longjmp).
 */
static __always_inline bool nested(struct pt_regs *ctx, struct thread *thread, __u64 sp)
{
	if (!thread || sp >= thread->sp)
		return false;
	return !skips_returns || !thread->returns_to ||
	       goes_on(ctx, thread->sp, thread->returns_to);
}

static __noinline struct thread *thread_of_current(void)
{
	__u64 id = bpf_get_current_pid_tgid();
	struct thread *thread = value_of(&threads, &id, (const void *)&no_thread);

	if (!thread)
		count_loss(calls);
	return thread;
}

/*
 * The current thread has entered a function that allocates or maps. Returns its
 * record, or NULL if the call is not to be followed to its return.
 */
static __noinline struct thread *begin(struct pt_regs *ctx, __u32 signature)
{
	struct thread *thread = thread_of_current();
	__u64 sp = PT_REGS_SP(ctx);
	__u32 count;

	/* Read once: clang would add the offset to the context, which the verifier refuses. */
	barrier_var(sp);
	if (!thread || nested(ctx, thread, sp))
		return NULL;
	thread->sp = sp;
	thread->size = argument(ctx, field(signature, SIGNATURE_SIZE));
	count = field(signature, SIGNATURE_COUNT);
	if (count)
		thread->size = product(argument(ctx, count), thread->size);
	thread->address = argument(ctx, field(signature, SIGNATURE_ADDRESS));
	thread->result = argument(ctx, field(signature, SIGNATURE_RESULT));
	thread->kind = field(signature, SIGNATURE_KIND);
	thread->level = current_level();
	thread->recorded = thread->kind != FUNCTION_UNMAP && wanted(thread->size, thread->level);
	thread->replaces = 0;
	thread->returns_to = 0;
	if (thread->recorded)
		__sync_fetch_and_add(&hits_of_cpu()->recorded, 1);
	if (trace_calls && thread->recorded)
		emit(EVENT_ALLOC_ENTER, 0, thread->size, 0);
	return thread;
}

static __noinline int begin_mapping(struct pt_regs *ctx, struct thread *thread)
{
	__u64 flags = PT_REGS_PARM4(ctx);

	if (thread->kind == FUNCTION_MAP) {
		thread->replaces = !!(flags & MAP_FIXED);
		return 0;
	}
	/* mremap(old, 0, ...) and MREMAP_DONTUNMAP leave the old mapping there. */
	if (!PT_REGS_PARM2(ctx) || (thread->kind == FUNCTION_REMAP && flags & MREMAP_DONTUNMAP))
		return 0;
	thread->replaces = 1;
	return emit(EVENT_UNMAP, thread->address, PT_REGS_PARM2(ctx), 0);
}

static __noinline int mapped(struct pt_regs *ctx, struct thread *thread)
{
	__u64 address = PT_REGS_RC(ctx);

	if (address == ~0ULL) { /* MAP_FAILED; the -1 of munmap */
		if (thread->kind != FUNCTION_MAP && thread->replaces)
			emit(EVENT_UNMAP_FAILED, 0, 0, 0);
		return 0;
	}
	if (thread->recorded)
		emit_sampled(EVENT_MAP, address, thread->size, stack_of_caller_at_return(ctx),
			     thread->level);
	else if (thread->kind == FUNCTION_REMAP ||
		 (thread->kind == FUNCTION_MAP && thread->replaces))
		emit(EVENT_MAP_IGNORED, address, thread->size, 0);
	return 0;
}

/* What an allocation function returned; 0 if it failed. */
static __always_inline __u64 result_of(struct pt_regs *ctx, const struct thread *thread)
{
	__u64 address = PT_REGS_RC(ctx);

	if (!thread->result)
		return address;
	if ((__u32)address) /* an errno */
		return 0;
	bpf_probe_read_user(&address, sizeof(address), (void *)thread->result);
	return address;
}

static __always_inline void allocated(struct pt_regs *ctx, struct thread *thread, bool use_table)
{
	__u64 address = result_of(ctx, thread);

	if (trace_calls && thread->recorded)
		emit(EVENT_ALLOC_EXIT, address, thread->size, 0);
	if (thread->replaces) {
		/* realloc(p, 0) frees p and may return NULL; otherwise NULL leaves it alone. */
		if (address || !thread->size)
			block_freed(&thread->held);
		else
			live_put(thread->address, thread->held.size, thread->held.stack,
				 thread->held.born, use_table);
	}
	if (address && thread->recorded)
		block_allocated(address, thread, stack_of_caller_at_return(ctx), use_table);
}

/*
 * Whether the allocator called its own free. When a thread ends, glibc frees once
 * more what the thread has freed into its cache, from tcache_thread_shutdown(),
 * which is within a few hundred bytes of free.
 */
static __noinline int called_by_allocator(struct pt_regs *ctx)
{
	__u64 ip = PT_REGS_IP(ctx);

	barrier_var(ip);
	return stack_return_address(ctx) - ip + BESIDE_FREE < 2 * BESIDE_FREE;
}

/* Whether the options leave nothing out. Else nothing is known of a free of what is not live. */
static __always_inline bool records_all(void)
{
	return sample_rate <= 1 && !sample_bytes && !level_bytes && !min_size && max_size == ~0ULL;
}

/*
 * Whether a function that frees was called by another one, which counts already:
 * libc_malloc_debug's free() calls glibc's.
 */
static __always_inline int within_free(struct pt_regs *ctx, struct thread *thread)
{
	__u64 sp = PT_REGS_SP(ctx), ip = PT_REGS_IP(ctx), outer_sp = thread->freeing_sp;

	barrier_var(sp);
	barrier_var(ip);
	if (!outer_sp || sp > outer_sp)
		return 0;
	if (sp < outer_sp)
		return goes_on(ctx, outer_sp, thread->freeing_returns_to);
	/* By a jump, as its last call: no other function is called from there. */
	return ip != thread->freeing_ip && stack_return_address(ctx) == thread->freeing_returns_to;
}

/* A function that frees was called, and may call another one. */
static __noinline int begin_freeing(struct pt_regs *ctx)
{
	struct thread *thread = thread_of_current();
	__u64 sp = PT_REGS_SP(ctx);

	barrier_var(sp);
	if (!thread || within_free(ctx, thread))
		return 0;
	thread->freeing_sp = sp;
	thread->freeing_ip = PT_REGS_IP(ctx);
	thread->freeing_returns_to = stack_return_address(ctx);
	return 0;
}

/*
 * Whether a free is the allocator's own, or by a function above that counts already.
 * A function of its own, as the verifier allows eight frames.
 */
static __noinline int nested_free(struct pt_regs *ctx)
{
	struct thread *thread = thread_of_current();

	return !thread || nested(ctx, thread, PT_REGS_SP(ctx)) || within_free(ctx, thread) ||
	       called_by_allocator(ctx);
}

/* A free of what is not live. If it was freed before, it was allocated at `born`. */
static __noinline int freed_unknown(struct pt_regs *ctx, __u64 address, __u64 born, int state)
{
	/* A process that shares the memory can have allocated it again, and not be traced. */
	if (state != LIVE_FREED || (born & BORN_TIME) < shared_memory_ns) {
		__sync_fetch_and_add(&frees.unknown, 1);
		return count_unknown_frees ? unknown_free_by(stack_of_caller_at_entry(ctx)) : 0;
	}
	__sync_fetch_and_add(&frees.twice, 1);
	return emit(EVENT_FREED_TWICE, address, 0, stack_of_caller_at_entry(ctx));
}

static __always_inline void release(struct pt_regs *ctx, __u32 signature, bool use_table)
{
	__u64 address = argument(ctx, field(signature, SIGNATURE_ADDRESS));
	struct live_block block = {};
	int state;

	if (!address)
		return;
	state = live_take(address, &block, use_table);
	if (state == LIVE_FOUND) {
		block_freed(&block);
		if (trace_calls)
			emit(EVENT_FREE_ENTER, address, block.size, 0);
	} else if (records_all() && !nested_free(ctx)) {
		freed_unknown(ctx, address, block.born, state);
	}
	if (records_all() && field(signature, SIGNATURE_WRAPS))
		begin_freeing(ctx);
}

/*
 * Do without the return of a call if nothing will be recorded of it: half of what
 * such a call costs is its return. Returns 1 if so.
 */
static __noinline int skip_return(struct pt_regs *ctx, struct thread *thread)
{
	if (!skips_returns || thread->kind != FUNCTION_ALLOCATE || thread->recorded ||
	    thread->replaces)
		return 0;
	thread->returns_to = stack_return_address(ctx);
	return thread->returns_to != 0;
}

/* Returns 1 if the function's return is to be seen. */
static __always_inline int enter(struct pt_regs *ctx, __u32 signature, bool use_table)
{
	struct task_ids ids;
	struct thread *thread;

	count_hit();
	if (!filter_wants(&ids))
		return 0;
	if (field(signature, SIGNATURE_KIND) == FUNCTION_FREE) {
		release(ctx, signature, use_table);
		return 0;
	}
	thread = begin(ctx, signature);
	if (!thread)
		return 0;
	if (thread->kind != FUNCTION_ALLOCATE)
		begin_mapping(ctx, thread);
	/*
	 * realloc takes the old block away before it returns, and another thread may
	 * be given its address at once. So the block leaves the live ones at entry,
	 * and comes back if realloc fails.
	 */
	else if (thread->address && !only_totals)
		thread->replaces =
		    live_take(thread->address, &thread->held, use_table) == LIVE_FOUND;
	return !skip_return(ctx, thread);
}

static __always_inline int leave(struct pt_regs *ctx, bool use_table)
{
	__u64 id = bpf_get_current_pid_tgid();
	struct thread *thread = bpf_map_lookup_elem(&threads, &id);

	count_hit();
	/* The return has popped the return address that was on top of the stack at entry. */
	if (!thread || PT_REGS_SP(ctx) != stack_pointer_after_return(thread->sp))
		return 0;
	thread->sp = 0;
	if (thread->kind == FUNCTION_ALLOCATE)
		allocated(ctx, thread, use_table);
	else
		mapped(ctx, thread);
	return 0;
}

/* The same for all programs with the table, and for all without. */
static __noinline int enter_with_table(struct pt_regs *ctx, __u32 signature)
{
	return enter(ctx, signature, true);
}

static __noinline int enter_without_table(struct pt_regs *ctx, __u32 signature)
{
	return enter(ctx, signature, false);
}

/*
 * At the entry the instruction pointer is at the probe. To there no function
 * returns, as no call is before it. bpf_session_is_return() would tell it too,
 * but to find that takes all of the kernel's BTF, 5 ms of the start.
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
		result = !enter_with_table(ctx, bpf_get_attach_cookie(ctx));
	timing_end(start);
	return result;
}

/*
 * Calls of a function of memleak's own, which another thread than its first
 * makes: what tells if links for one process see all of its threads.
 */
__u64 trial_calls;

SEC("uprobe.multi")
int trial(struct pt_regs *ctx)
{
	__sync_fetch_and_add(&trial_calls, 1);
	return 0;
}

/* With links of their own for each probe, and as uprobe.multi with one for all. */
SEC("uprobe")
int cookie_entry(struct pt_regs *ctx)
{
	__u64 start = timing_start();

	enter_with_table(ctx, bpf_get_attach_cookie(ctx));
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
 * Without cookies, a program for each signature says which one a call has, and goes on to the one
 * that does the work. They are a few instructions each: to verify the other one sixteen times was
 * most of the start.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64); /* the signature, and below it the thread whose call has it */
} plain_calls SEC(".maps");

/* Has plain_entry. */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} plain_work SEC(".maps");

/*
 * Kernels without cookies run this on the CPU on which the call was begun, before another one
 * there. On others, which are tried only if cookies fail, a thread can come between: the call is
 * lost then.
 */
SEC("uprobe")
int plain_entry(struct pt_regs *ctx)
{
	__u64 start = timing_start();
	__u32 zero = 0, thread = bpf_get_current_pid_tgid();
	volatile __u64 *call = bpf_map_lookup_elem(&plain_calls, &zero);
	__u64 begun = call ? *call : 0;

	if ((__u32)begun == thread)
		enter_without_table(ctx, begun >> 32);
	else
		count_loss(calls);
	timing_end(start);
	return 0;
}

static __always_inline int enter_plain(struct pt_regs *ctx, __u32 signature)
{
	__u32 zero = 0, thread = bpf_get_current_pid_tgid();
	volatile __u64 *call = bpf_map_lookup_elem(&plain_calls, &zero);

	if (call) {
		*call = (__u64)signature << 32 | thread;
		bpf_tail_call(ctx, &plain_work, 0);
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

ENTRY(0)
ENTRY(1)
ENTRY(2)
ENTRY(3)
ENTRY(4)
ENTRY(5)
ENTRY(6)
ENTRY(7)
ENTRY(8)
ENTRY(9)
ENTRY(10)
ENTRY(11)
ENTRY(12)
ENTRY(13)
ENTRY(14)
ENTRY(15)

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
 * A child of vfork() that is not traced can allocate and free what its parent then
 * frees or allocates.
 */
SEC("raw_tp/sched_process_fork")
int process_shares(struct bpf_raw_tracepoint_args *ctx)
{
	struct task_struct *parent = (void *)ctx->args[0], *child = (void *)ctx->args[1];
	struct task_ids ids;

	if (BPF_CORE_READ(child, mm) == BPF_CORE_READ(parent, mm) &&
	    BPF_CORE_READ(child, signal) != BPF_CORE_READ(parent, signal) && filter_wants(&ids))
		shared_memory_ns = bpf_ktime_get_ns();
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

/* A thread that ends inside a call must not leave it to the next one with its id. */
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
