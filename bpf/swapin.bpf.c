// SPDX-License-Identifier: BSD-2-Clause
/*
 * swapin: pages read back from swap, by process.
 *
 * Hooks, each by fentry or else by kprobe; tools/swapin/attach.rs chooses:
 *   swap_readpage, later swap_read_folio    the reading of pages
 *   zswap_load, return (6.6 and later)   whether zswap had them
 *   do_swap_page, entry and return          how long the task was held up; for shared
 *                                           memory shmem_swapin_folio, before 5.18
 *                                           shmem_swapin_page
 *   swap_writepage, later swap_writeout     the writing, with --out
 */
#include "cgroup_path.bpf.h"
#include "count.bpf.h"
#include "filter.bpf.h"
#include "histogram.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

struct task_key {
	__u64 cgroup; /* as cgroup_of_current() has it */
	__u32 pid;
	__u32 reserved;
	char comm[COMM_BYTES];
};
EXPORT_TYPE(struct task_key);

/* A swap fault that some thread is in. */
struct fault {
	__u64 begin_ns;
	__u32 read; /* it came to the reading of a page */
	__u32 reserved;
};

/* What is counted of a process. */
struct total {
	__u64 pages_in;
	__u64 pages_zswap; /* of these */
	__u64 pages_out;
	__u64 held_up_ns;
};
EXPORT_TYPE(struct total);

COUNTS(totals, struct task_key, struct total, COUNT_KEYS);

const volatile struct total no_total;

/* The pages that are being read; with_zswap. */
BY_THREAD(reading, __u64);

BY_THREAD(faults, struct fault);

/* Of the swap faults that came to a reading. */
struct histogram latency_ns;

/* Options, set before load. */
const volatile __u8 with_latency;
const volatile __u8 with_zswap;
/* Whether zswap says "true" of what it has, or 0 (and an error of what it has not). */
const volatile __u8 zswap_says_bool;

/* The current process's counts, if they are wanted. */
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

/* Where kernels keep how many pages a large folio has. */
struct folio___nr_pages {
	unsigned int _nr_pages;
};

struct folio___folio_nr_pages {
	unsigned int _folio_nr_pages;
};

/* 5.10: in the second struct page of a compound one. */
struct page___compound_order {
	unsigned char compound_order;
};

/* The pages of what begins with this struct page, which a struct folio does too. */
static __always_inline __u64 pages_of(const void *first)
{
	__u64 head = 1ULL << bpf_core_enum_value(enum pageflags, PG_head);
	__u64 flags = 0;

	/* The flags are the first word, whatever type they are of. */
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

/* zswap was asked for the pages that the thread is reading. */
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
/* Seven arguments, and fexit takes no more than six before 6.6. */
HOLDS_UP(shmem_swapin_folio)
HOLDS_UP(shmem_swapin_page)
/* clang-format on */

/* A thread whose return was not seen must not leave its fault to the next one with its number. */
SEC("?raw_tp/sched_process_exit")
int thread_exit(void *ctx)
{
	__u64 thread = bpf_get_current_pid_tgid();

	bpf_map_delete_elem(&faults, &thread);
	bpf_map_delete_elem(&reading, &thread);
	return 0;
}
