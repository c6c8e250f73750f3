// SPDX-License-Identifier: BSD-2-Clause
/*
 * swapin: swap-ins by process.
 *
 * Hooks, each by fentry or else by kprobe; tools/swapin/attach.rs chooses:
 *   swap_readpage, later swap_read_folio    reads of pages
 *   zswap_load, return (6.6 and later)      whether zswap had the pages
 *   do_swap_page, entry and return          how long the task was delayed; for shared
 *                                           memory shmem_swapin_folio, before 5.18
 *                                           shmem_swapin_page
 *   swap_writepage, later swap_writeout     writes of pages, with --out
 */
#include "cgroup_path.bpf.h"
#include "count.bpf.h"
#include "filter.bpf.h"
#include "histogram.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

struct task_key {
	__u64 cgroup; /* id, as cgroup_of_current() returns it */
	__u32 pid;
	__u32 reserved;
	char comm[COMM_BYTES];
};
EXPORT_TYPE(struct task_key);

/* Swap fault that a thread is in. */
struct fault {
	__u64 begin_ns;
	__u32 read; /* 1: the fault has read a page */
	__u32 reserved;
};

/* Counts of a process. */
struct total {
	__u64 pages_in;
	__u64 pages_zswap; /* of pages_in, those that zswap had */
	__u64 pages_out;
	__u64 held_up_ns;
};
EXPORT_TYPE(struct total);

COUNTS(totals, struct task_key, struct total, COUNT_KEYS);

const volatile struct total no_total;

/* Number of pages that each thread is reading; with_zswap. */
BY_THREAD(reading, __u64);

BY_THREAD(faults, struct fault);

/* Latencies of the swap faults that have read a page. */
struct histogram latency_ns;

/* Options, set before load. */
const volatile __u8 with_latency;
const volatile __u8 with_zswap;
/*
 * Whether zswap returns true for pages that it has. Otherwise it returns 0 for them, and an error
 * for other pages.
 */
const volatile __u8 zswap_says_bool;

/* Returns the counts of the current process, or NULL if the options do not match it. */
static __noinline struct total *total_of_current(void)
{
	struct task_key key = {};
	struct task_ids ids;

	if (!filter_wants(&ids))
		return NULL;
	key.cgroup = cgroup_of_current();
	key.pid = ids.pid;
	bpf_get_current_comm(key.comm, sizeof(key.comm));
	return count_of(totals, &key, (const void *)&no_total);
}

/* Fields that hold the number of pages of a large folio, by kernel. */
struct folio___nr_pages {
	unsigned int _nr_pages;
};

struct folio___folio_nr_pages {
	unsigned int _folio_nr_pages;
};

/* Field of 5.10, in the second struct page of a compound page. */
struct page___compound_order {
	unsigned char compound_order;
};

/* Returns the number of pages of a page or folio, which both begin with this struct page. */
static __always_inline __u64 pages_of(const void *first)
{
	__u64 head = 1ULL << bpf_core_enum_value(enum pageflags, PG_head);
	__u64 flags = 0;

	/* The flags are the first word, whatever their type. */
	bpf_probe_read_kernel(&flags, sizeof(flags), first);
	if (!(flags & head))
		return 1;
	if (bpf_core_field_exists(struct folio___nr_pages, _nr_pages))
		return BPF_CORE_READ((struct folio___nr_pages *)first, _nr_pages);
	if (bpf_core_field_exists(struct folio___folio_nr_pages, _folio_nr_pages))
		return BPF_CORE_READ((struct folio___folio_nr_pages *)first, _folio_nr_pages);
	if (bpf_core_field_exists(struct page___compound_order, compound_order)) {
		struct page___compound_order *second =
		    (void *)first + bpf_core_type_size(struct page);

		return 1ULL << (BPF_CORE_READ(second, compound_order) & 31);
	}
	return 1;
}

static __always_inline int pages_are_read(const void *first)
{
	__u64 thread = bpf_get_current_pid_tgid(), pages = pages_of(first);
	struct total *total = total_of_current();

	if (!total)
		return 0;
	__sync_fetch_and_add(&total->pages_in, pages);
	if (with_latency) {
		struct fault *fault = bpf_map_lookup_elem(&faults, &thread);

		if (fault)
			fault->read = 1;
	}
	if (with_zswap && bpf_map_update_elem(&reading, &thread, &pages, BPF_ANY))
		count_loss(calls);
	return 0;
}

/* Handles zswap's answer for the pages that the thread is reading. */
static __always_inline int zswap_answers(__u64 result)
{
	__u64 thread = bpf_get_current_pid_tgid();
	__u64 *pages = bpf_map_lookup_elem(&reading, &thread);
	bool had = zswap_says_bool ? result & 1 : !(__u32)result;
	struct total *total;

	if (!pages)
		return 0;
	total = had ? total_of_current() : NULL;
	if (total)
		__sync_fetch_and_add(&total->pages_zswap, *pages);
	bpf_map_delete_elem(&reading, &thread);
	return 0;
}

static __always_inline int pages_are_written(const void *first)
{
	struct total *total = total_of_current();

	if (total)
		__sync_fetch_and_add(&total->pages_out, pages_of(first));
	return 0;
}

static __always_inline int fault_begins(void)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct fault fault = { .begin_ns = bpf_ktime_get_ns() };
	struct task_ids ids;

	if (!filter_wants(&ids))
		return 0;
	begin_call(&faults, thread, &fault);
	return 0;
}

static __always_inline int fault_ends(void)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct fault *fault = bpf_map_lookup_elem(&faults, &thread);
	struct total *total;
	__u64 took;

	if (!fault)
		return 0;
	total = fault->read ? total_of_current() : NULL;
	if (total) {
		took = bpf_ktime_get_ns() - fault->begin_ns;
		__sync_fetch_and_add(&total->held_up_ns, took);
		histogram_add(&latency_ns, took);
	}
	bpf_map_delete_elem(&faults, &thread);
	return 0;
}

/* clang-format off */
#define READS(function)                                                                            \
	SEC("?fentry/" #function)                                                                  \
	int BPF_PROG(function##_fentry, const void *first) { return pages_are_read(first); }       \
	SEC("?kprobe/" #function)                                                                  \
	int BPF_KPROBE(function##_kprobe, const void *first) { return pages_are_read(first); }

#define WRITES(function)                                                                           \
	SEC("?fentry/" #function)                                                                  \
	int BPF_PROG(function##_fentry, const void *first) { return pages_are_written(first); }    \
	SEC("?kprobe/" #function)                                                                  \
	int BPF_KPROBE(function##_kprobe, const void *first) { return pages_are_written(first); }

READS(swap_readpage)
READS(swap_read_folio)
WRITES(swap_writepage)
WRITES(swap_writeout)
/* clang-format on */

SEC("?fexit/zswap_load")
int BPF_PROG(zswap_load_fentry, void *folio, __u64 result)
{
	return zswap_answers(result);
}

SEC("?kretprobe/zswap_load")
int BPF_KRETPROBE(zswap_load_kprobe, __u64 result)
{
	return zswap_answers(result);
}

/* clang-format off */
#define HOLDS_UP(function)                                                                         \
	SEC("?kprobe/" #function) int function##_begin_kprobe(void *ctx) { return fault_begins(); } \
	SEC("?kretprobe/" #function) int function##_end_kprobe(void *ctx) { return fault_ends(); }

SEC("?fentry/do_swap_page") int do_swap_page_begin_fentry(void *ctx) { return fault_begins(); }
SEC("?fexit/do_swap_page") int do_swap_page_end_fentry(void *ctx) { return fault_ends(); }
HOLDS_UP(do_swap_page)
/* These have seven arguments, and fexit takes no more than six before 6.6. */
HOLDS_UP(shmem_swapin_folio)
HOLDS_UP(shmem_swapin_page)
/* clang-format on */

/*
 * An entry of `reading` is not counted as lost: zswap is not requested a page of zeroes (6.12 and
 * later), so that the entry stays although nothing was missed.
 */
SEC("?raw_tp/sched_process_exit")
int thread_exit(void *ctx)
{
	__u64 thread = bpf_get_current_pid_tgid();

	lose_call(&faults);
	bpf_map_delete_elem(&reading, &thread);
	return 0;
}
