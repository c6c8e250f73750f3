// SPDX-License-Identifier: BSD-2-Clause
/*
 * memleak: memory that was allocated and not freed, by call stack.
 *
 * Hooks: uprobes on the allocation functions of the target (entry and return),
 * on free (entry), and sched_process_exit to forget a thread's call in flight.
 *
 * Blocks of the allocator live in the map `blocks`, keyed by address. Mappings
 * (mmap, munmap, mremap) can be unmapped in part, which takes an ordered map:
 * they go to user space as events, in order, and are kept there.
 *
 * Every handler exists twice, for one perf uprobe per function and for one
 * multi-uprobe link per role with the function in its cookie (6.13 and later);
 * tools/memleak/probes.rs chooses.
 */
#include "event.bpf.h"
#include "stack.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* The functions probed; tools/memleak/probes.rs has their names. */
enum function {
	FUNCTION_MALLOC,
	FUNCTION_CALLOC,
	FUNCTION_REALLOC,
	FUNCTION_REALLOCARRAY,
	FUNCTION_POSIX_MEMALIGN,
	FUNCTION_ALIGNED_ALLOC,
	FUNCTION_MEMALIGN,
	FUNCTION_VALLOC,
	FUNCTION_PVALLOC,
	FUNCTION_MMAP,
	FUNCTION_MUNMAP,
	FUNCTION_MREMAP,
	FUNCTION_FREE,
};

enum event_kind {
	EVENT_MAP,	    /* [address, address + size) was mapped by the caller in `stack` */
	EVENT_MAP_IGNORED,  /* the same, but the options exclude it */
	EVENT_UNMAP,	    /* it is about to be unmapped */
	EVENT_UNMAP_FAILED, /* the last EVENT_UNMAP of this thread did not happen */
	EVENT_ALLOC_ENTER,  /* --trace only, as the two below */
	EVENT_ALLOC_EXIT,
	EVENT_FREE_ENTER,
};

struct event {
	__u64 time_ns; /* CLOCK_MONOTONIC */
	__u64 address;
	__u64 size; /* bytes */
	__u64 stack;
	__u32 pid;
	__u32 tid;
	enum event_kind kind;
	enum function function;
	char comm[16];
};
struct event *unused_event __attribute__((unused));

/* A live block. Its address is the key. */
struct block {
	__u64 size;    /* bytes asked for */
	__u64 time_ns; /* CLOCK_MONOTONIC at allocation */
	__u64 stack;   /* id in `stacks`, 0: lost */
};

/* An allocation function that some thread is in. */
struct call {
	__u64 sp;      /* stack pointer at entry */
	__u64 size;    /* bytes asked for; saturated where the product overflows */
	__u64 pointer; /* old block (realloc), result's address (posix_memalign), flags (mmap) */
	__u16 function;
	__u8 recorded;	/* the options want it */
	__u8 holds_old; /* `held` has the old block, until the outcome is known */
};

/* Blocks allocated by one stack and not freed. */
struct total {
	__u64 bytes;
	__u64 count;
};

#define MAP_FIXED	 0x10
#define MREMAP_DONTUNMAP 4

/* Options, set before load. */
const volatile __u64 min_size;
const volatile __u64 max_size = ~0ULL;
const volatile __u32 sample_rate = 1;
const volatile __u8 trace_calls;
const volatile __u8 keep_totals;

/* Set by the first probe that fires. */
__u8 seen;

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1); /* --max-allocs */
	__type(key, __u64);	/* address */
	__type(value, struct block);
} blocks SEC(".maps");

/* By thread: pid_tgid as bpf_get_current_pid_tgid() returns it. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 32768);
	__type(key, __u64);
	__type(value, struct call);
} calls SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 32768);
	__type(key, __u64);
	__type(value, struct block);
} held SEC(".maps");

/* By stack; used with --combined-only. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64);
	__type(value, struct total);
} totals SEC(".maps");

const volatile struct total no_total;

static __always_inline bool wanted(__u64 size)
{
	if (size < min_size || size > max_size)
		return false;
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

static __noinline int emit(__u32 kind, __u32 function, __u64 address, __u64 size, __u64 stack)
{
	struct event *event = event_reserve(sizeof(*event));
	__u64 thread = bpf_get_current_pid_tgid();

	if (!event)
		return 0;
	event->time_ns = bpf_ktime_get_ns();
	event->address = address;
	event->size = size;
	event->stack = stack;
	event->pid = thread >> 32;
	event->tid = (__u32)thread;
	event->kind = kind;
	event->function = function;
	bpf_get_current_comm(event->comm, sizeof(event->comm));
	bpf_ringbuf_submit(event, 0);
	return 0;
}

static __noinline int total_add(__u64 stack, __u64 bytes)
{
	struct total *total = bpf_map_lookup_elem(&totals, &stack);

	if (!total) {
		bpf_map_update_elem(&totals, &stack, (const void *)&no_total, BPF_NOEXIST);
		total = bpf_map_lookup_elem(&totals, &stack);
		if (!total) {
			count_loss(entries);
			return 0;
		}
	}
	__sync_fetch_and_add(&total->bytes, bytes);
	__sync_fetch_and_add(&total->count, 1);
	return 0;
}

static __noinline int total_subtract(__u64 stack, __u64 bytes)
{
	struct total *total = bpf_map_lookup_elem(&totals, &stack);

	if (total) {
		__sync_fetch_and_add(&total->bytes, -bytes);
		__sync_fetch_and_add(&total->count, -1);
	}
	return 0;
}

static __noinline int block_insert(__u64 address, __u64 size, __u64 stack)
{
	struct block block = {
		.size = size,
		.time_ns = bpf_ktime_get_ns(),
		.stack = stack,
	};

	if (bpf_map_update_elem(&blocks, &address, &block, BPF_ANY)) {
		count_loss(entries);
		return 0;
	}
	if (keep_totals)
		total_add(stack, size);
	return 0;
}

/* Forget the block at `address`. Returns 0 if there was none. */
static __noinline int block_remove(__u64 address)
{
	struct block *block = bpf_map_lookup_elem(&blocks, &address);
	__u64 stack, size;

	if (!block)
		return 0;
	stack = block->stack;
	size = block->size;
	if (bpf_map_delete_elem(&blocks, &address))
		return 0;
	if (keep_totals)
		total_subtract(stack, size);
	return 1;
}

/*
 * realloc takes the old block away before it returns, and another thread may
 * be given its address at once. So the block leaves the table at entry, and
 * comes back if realloc fails.
 */
static __noinline int block_hold(__u64 address)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct block *block = bpf_map_lookup_elem(&blocks, &address);

	if (!block)
		return 0;
	if (bpf_map_update_elem(&held, &thread, block, BPF_ANY)) {
		count_loss(calls);
		return 0;
	}
	return block_remove(address);
}

static __noinline int block_restore(__u64 address)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct block *block = bpf_map_lookup_elem(&held, &thread);

	if (!block)
		return 0;
	if (bpf_map_update_elem(&blocks, &address, block, BPF_ANY))
		count_loss(entries);
	else if (keep_totals)
		total_add(block->stack, block->size);
	return 0;
}

/*
 * A call made by the allocator itself, such as the mmap of a large malloc: its
 * stack pointer is below that of the outer call. A record that is not below
 * was left behind by a call that never returned (longjmp).
 */
static __always_inline bool nested(const struct call *outer, __u64 sp)
{
	return outer && sp < outer->sp;
}

static __noinline int begin(__u64 sp, __u32 function, __u64 size, __u64 pointer, __u64 old_size)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct call *outer = bpf_map_lookup_elem(&calls, &thread);
	struct call call = {};

	if (nested(outer, sp))
		return 0;
	call.sp = sp;
	call.size = size;
	call.pointer = pointer;
	call.function = function;
	call.recorded = function != FUNCTION_MUNMAP && wanted(size);

	if (trace_calls && call.recorded)
		emit(EVENT_ALLOC_ENTER, function, 0, size, 0);
	if (function == FUNCTION_REALLOC || function == FUNCTION_REALLOCARRAY)
		call.holds_old = pointer && block_hold(pointer);
	if (old_size) {
		emit(EVENT_UNMAP, function, pointer, old_size, 0);
		call.holds_old = 1;
	}
	if (bpf_map_update_elem(&calls, &thread, &call, BPF_ANY))
		count_loss(calls);
	return 0;
}

static __noinline int mapped(struct pt_regs *ctx, struct call *call)
{
	__u64 address = PT_REGS_RC(ctx);

	if (address == ~0ULL) { /* MAP_FAILED; the -1 of munmap */
		if (call->holds_old)
			emit(EVENT_UNMAP_FAILED, call->function, 0, 0, 0);
		return 0;
	}
	if (call->recorded)
		emit(EVENT_MAP, call->function, address, call->size,
		     stack_of_caller_at_return(ctx));
	else if (call->function == FUNCTION_MREMAP ||
		 (call->function == FUNCTION_MMAP && call->pointer & MAP_FIXED))
		emit(EVENT_MAP_IGNORED, call->function, address, call->size, 0);
	return 0;
}

static __noinline int allocated(struct pt_regs *ctx, struct call *call)
{
	__u64 address = PT_REGS_RC(ctx);

	if (call->function == FUNCTION_POSIX_MEMALIGN) {
		if ((__u32)address) /* an errno */
			return 0;
		bpf_probe_read_user(&address, sizeof(address), (void *)call->pointer);
	}
	if (trace_calls && call->recorded)
		emit(EVENT_ALLOC_EXIT, call->function, address, call->size, 0);
	if (!address) {
		/* realloc(p, 0) frees p and may return NULL; otherwise NULL leaves it alone. */
		if (call->holds_old && call->size)
			block_restore(call->pointer);
		return 0;
	}
	if (call->recorded)
		block_insert(address, call->size, stack_of_caller_at_return(ctx));
	return 0;
}

static __noinline int leave(struct pt_regs *ctx)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct call *call = bpf_map_lookup_elem(&calls, &thread);

	/* The return has popped the return address that was on top of the stack at entry. */
	if (!call || PT_REGS_SP(ctx) != call->sp + sizeof(long))
		return 0;

	if (call->function >= FUNCTION_MMAP)
		mapped(ctx, call);
	else
		allocated(ctx, call);
	bpf_map_delete_elem(&calls, &thread);
	return 0;
}

static __always_inline int enter(struct pt_regs *ctx, __u64 function)
{
	__u64 sp = PT_REGS_SP(ctx);
	__u64 a = PT_REGS_PARM1(ctx), b = PT_REGS_PARM2(ctx);
	__u64 c = PT_REGS_PARM3(ctx), d = PT_REGS_PARM4(ctx);

	seen = 1;
	switch (function) {
	case FUNCTION_MALLOC:
	case FUNCTION_VALLOC:
	case FUNCTION_PVALLOC:
		return begin(sp, function, a, 0, 0);
	case FUNCTION_ALIGNED_ALLOC:
	case FUNCTION_MEMALIGN:
		return begin(sp, function, b, 0, 0);
	case FUNCTION_CALLOC:
		return begin(sp, function, product(a, b), 0, 0);
	case FUNCTION_REALLOC:
		return begin(sp, function, b, a, 0);
	case FUNCTION_REALLOCARRAY:
		return begin(sp, function, product(b, c), a, 0);
	case FUNCTION_POSIX_MEMALIGN:
		return begin(sp, function, c, a, 0);
	case FUNCTION_MMAP:
		return begin(sp, function, b, d, 0);
	case FUNCTION_MUNMAP:
		return begin(sp, function, 0, a, b);
	case FUNCTION_MREMAP:
		/* mremap(old, 0, ...) and MREMAP_DONTUNMAP leave the old mapping there. */
		return begin(sp, function, c, a, d & MREMAP_DONTUNMAP ? 0 : b);
	}
	return 0;
}

static __always_inline int release(struct pt_regs *ctx)
{
	__u64 address = PT_REGS_PARM1(ctx);

	seen = 1;
	if (!address)
		return 0;
	if (trace_calls) {
		struct block *block = bpf_map_lookup_elem(&blocks, &address);

		if (block)
			emit(EVENT_FREE_ENTER, FUNCTION_FREE, address, block->size, 0);
	}
	block_remove(address);
	return 0;
}

#define PERF_ENTRY(name, function)                                                                 \
	SEC("uprobe")                                                                              \
	int name##_entry(struct pt_regs *ctx)                                                      \
	{                                                                                          \
		return enter(ctx, function);                                                       \
	}

PERF_ENTRY(malloc, FUNCTION_MALLOC)
PERF_ENTRY(calloc, FUNCTION_CALLOC)
PERF_ENTRY(realloc, FUNCTION_REALLOC)
PERF_ENTRY(reallocarray, FUNCTION_REALLOCARRAY)
PERF_ENTRY(posix_memalign, FUNCTION_POSIX_MEMALIGN)
PERF_ENTRY(aligned_alloc, FUNCTION_ALIGNED_ALLOC)
PERF_ENTRY(memalign, FUNCTION_MEMALIGN)
PERF_ENTRY(valloc, FUNCTION_VALLOC)
PERF_ENTRY(pvalloc, FUNCTION_PVALLOC)
PERF_ENTRY(mmap, FUNCTION_MMAP)
PERF_ENTRY(munmap, FUNCTION_MUNMAP)
PERF_ENTRY(mremap, FUNCTION_MREMAP)

SEC("uprobe")
int free_entry(struct pt_regs *ctx)
{
	return release(ctx);
}

SEC("uretprobe")
int any_return(struct pt_regs *ctx)
{
	return leave(ctx);
}

SEC("uprobe.multi")
int multi_entry(struct pt_regs *ctx)
{
	return enter(ctx, bpf_get_attach_cookie(ctx));
}

SEC("uprobe.multi")
int multi_free(struct pt_regs *ctx)
{
	return release(ctx);
}

SEC("uretprobe.multi")
int multi_return(struct pt_regs *ctx)
{
	return leave(ctx);
}

/* A thread that ends inside a call must not leave it to the next one with its id. */
SEC("raw_tp/sched_process_exit")
int thread_exit(void *ctx)
{
	__u64 thread = bpf_get_current_pid_tgid();

	bpf_map_delete_elem(&calls, &thread);
	return 0;
}
