// SPDX-License-Identifier: BSD-2-Clause
/*
 * hfaults: faults on huge pages, by process.
 *
 * Hooks, of which tools/hfaults chooses those that are requested and possible:
 *   hugetlb_fault                  fentry, else kprobe; with -e also its return
 *   page-faults software event     where neither can be had: 5.17 and later, as
 *                                  the fault's mapping must be looked up
 *   hugetlb_wp, alloc_hugetlb_folio and their older names: why a page faulted
 *   do_huge_pmd_anonymous_page     entry and return: transparent huge pages
 *   folio_add_new_anon_rmap        those of other sizes, from 6.8 on
 *   shmem_alloc_and_add_folio and the older shmem_alloc_hugefolio and
 *   shmem_alloc_hugepage           return: those of shared memory
 *   sys_enter_madvise              who requests transparent huge pages
 */
#include "cgroup_path.bpf.h"
#include "count.bpf.h"
#include "filter.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define VM_HUGETLB	  0x00400000
#define VM_FAULT_SIGBUS	  0x00000002
#define VM_FAULT_RETRY	  0x00000400
#define VM_FAULT_FALLBACK 0x00000800
#define VM_FAULT_FAILED	  0x00000073 /* VM_FAULT_ERROR, but for VM_FAULT_FALLBACK */
#define FAULT_FLAG_WRITE  0x01
#define MADV_HUGEPAGE	  14
#define EBUSY		  16

enum reason {
	REASON_UNKNOWN,
	REASON_NO_PAGE,	      /* there was no page yet */
	REASON_COPY_ON_WRITE, /* written to, and shared with another process */
	REASON_THP,	      /* transparent, and there was a huge page for it */
	REASON_THP_FALLBACK,  /* transparent, and small pages had to do */
	REASON_THP_ZERO,      /* transparent, and only read: the one huge page of zeroes */
	REASON_THP_SHARED,    /* transparent, of shared memory or a tmpfs */
	REASON_EXHAUSTED,     /* there was no page yet, nor any left in the pool: SIGBUS */
};

struct fault_key {
	__u64 cgroup; /* id, as cgroup_of_current() returns it */
	__u32 pid;
	enum reason reason;
	__u32 page_shift; /* binary logarithm of the page's size; 0: unknown */
	__u32 reserved;
	char comm[COMM_BYTES];
};
EXPORT_TYPE(struct fault_key);

/* Fault that a thread is in. */
struct fault {
	struct fault_key key;
	__u32 allocated; /* 1: a page was requested */
	__u32 reserved;
};

/* Options, set before load. */
const volatile __u8 by_size;
const volatile __u8 by_reason;
const volatile __u32 page_shift_base = 12;
const volatile __u32 huge_page_shift = 21; /* of the largest transparent huge page */
const volatile __u8 uses_zero_page = 1;

COUNTS(counts, struct fault_key, __u64, COUNT_KEYS);

/* Faults that are counted at their end, by thread. */
BY_THREAD(faults, struct fault);

static __always_inline bool begin(struct fault_key *key)
{
	struct task_ids ids;

	if (!filter_wants(&ids))
		return false;
	key->cgroup = cgroup_of_current();
	key->pid = ids.pid;
	bpf_get_current_comm(key->comm, sizeof(key->comm));
	return true;
}

/*
 * Returns the page shift of a hugetlb mapping. Such mappings all have a file, on a hugetlbfs that
 * has one size of pages.
 */
static __always_inline __u32 page_shift_of(struct vm_area_struct *vma)
{
	struct hugetlbfs_sb_info *info = BPF_CORE_READ(vma, vm_file, f_inode, i_sb, s_fs_info);

	return page_shift_base + BPF_CORE_READ(info, hstate, order);
}

static __always_inline int hugetlb_fault_begins(struct vm_area_struct *vma)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct fault fault = {};

	if (!begin(&fault.key))
		return 0;
	if (by_size)
		fault.key.page_shift = page_shift_of(vma);
	if (!by_reason) {
		count_add(counts, &fault.key, 1);
		return 0;
	}
	fault.key.reason = REASON_NO_PAGE;
	begin_call(&faults, thread, &fault);
	return 0;
}

/* Takes the fault that this thread is in, at its end. Returns 0 if its beginning was not seen. */
static __always_inline int take_fault(struct fault *taken)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct fault *fault = bpf_map_lookup_elem(&faults, &thread);

	if (!fault)
		return 0;
	*taken = *fault;
	bpf_map_delete_elem(&faults, &thread);
	return 1;
}

/* Counts a fault at its end, with by_reason: its reason is known then. */
static __always_inline int hugetlb_fault_ends(__u32 result)
{
	struct fault fault;

	/* A fault that is to be retried, with another lock, comes again. */
	if (!take_fault(&fault) || result & VM_FAULT_RETRY)
		return 0;
	if (fault.allocated && result & VM_FAULT_SIGBUS)
		fault.key.reason = REASON_EXHAUSTED;
	count_add(counts, &fault.key, 1);
	return 0;
}

SEC("?fentry/hugetlb_fault")
int BPF_PROG(fault_fentry, struct mm_struct *mm, struct vm_area_struct *vma)
{
	return hugetlb_fault_begins(vma);
}

SEC("?kprobe/hugetlb_fault")
int BPF_KPROBE(fault_kprobe, struct mm_struct *mm, struct vm_area_struct *vma)
{
	return hugetlb_fault_begins(vma);
}

SEC("?fexit/hugetlb_fault")
int BPF_PROG(fault_end_fentry, struct mm_struct *mm, struct vm_area_struct *vma,
	     unsigned long address, unsigned int flags, unsigned int result)
{
	return hugetlb_fault_ends(result);
}

SEC("?kretprobe/hugetlb_fault")
int BPF_KRETPROBE(fault_end_kprobe, unsigned int result)
{
	return hugetlb_fault_ends(result);
}

static __always_inline int page_is_allocated(void)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct fault *fault = bpf_map_lookup_elem(&faults, &thread);

	if (fault)
		fault->allocated = 1;
	return 0;
}

/*
 * Notes that a fault is for a write-protected page. The function for write faults is also called
 * for a page that has just been brought in, to spare a second fault. If no page was allocated
 * before, the page was there.
 */
static __always_inline int page_is_write_protected(void)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct fault *fault = bpf_map_lookup_elem(&faults, &thread);

	if (fault && !fault->allocated)
		fault->key.reason = REASON_COPY_ON_WRITE;
	return 0;
}

/* clang-format off */
#define REASON_PROBES(function, what)                                                              \
	SEC("?fentry/" #function) int function##_fentry(void *ctx) { return what(); }              \
	SEC("?kprobe/" #function) int function##_kprobe(void *ctx) { return what(); }

/* alloc_huge_page became alloc_hugetlb_folio, and hugetlb_cow hugetlb_wp. */
REASON_PROBES(alloc_hugetlb_folio, page_is_allocated)
REASON_PROBES(alloc_huge_page, page_is_allocated)
REASON_PROBES(hugetlb_wp, page_is_write_protected)
REASON_PROBES(hugetlb_cow, page_is_write_protected)
/* clang-format on */

SEC("?raw_tp/sched_process_exit")
int thread_exit(void *ctx)
{
	lose_call(&faults);
	return 0;
}

static long count_if_hugetlb(struct task_struct *task, struct vm_area_struct *vma,
			     struct fault_key *key)
{
	if (!(BPF_CORE_READ(vma, vm_flags) & VM_HUGETLB))
		return 0;
	if (by_size)
		key->page_shift = page_shift_of(vma);
	count_add(counts, key, 1);
	return 0;
}

/*
 * Counts a fault of the software event. The event does not contain the mapping, which is looked up.
 */
SEC("?perf_event")
int fault_event(struct bpf_perf_event_data *ctx)
{
	struct fault_key key = {};
	long found;

	if (!begin(&key))
		return 0;
	found = bpf_find_vma(bpf_get_current_task_btf(), ctx->addr, count_if_hugetlb, &key, 0);
	/* Another thread is changing the mappings, or waits to. */
	if (found == -EBUSY)
		count_loss(lookups);
	return 0;
}

/* 5.10 has the flags as a number, later kernels as an enum, of which they are bits. */
struct vm_fault___number {
	unsigned int flags;
} __attribute__((preserve_access_index));

static __always_inline __u32 flags_of(struct vm_fault *vmf)
{
	struct vm_fault___number *old = (void *)vmf;

	if (bpf_core_field_exists(old->flags))
		return BPF_CORE_READ(old, flags);
	return BPF_CORE_READ(vmf, flags);
}

/*
 * Returns the reason under which a fault is counted if it succeeds. REASON_UNKNOWN: the fault is
 * not counted, as the mapping does not span a huge page at that address. The kernel tries all the
 * same, and no counter shows it (thp_fault_fallback of /proc/vmstat counts huge pages that could
 * not be allocated).
 */
static __always_inline enum reason thp_reason(struct vm_fault *vmf)
{
	__u64 huge_page_bytes = 1ULL << huge_page_shift;
	__u64 start = BPF_CORE_READ(vmf, address) & -huge_page_bytes;

	if (start < BPF_CORE_READ(vmf, vma, vm_start) ||
	    start + huge_page_bytes > BPF_CORE_READ(vmf, vma, vm_end))
		return REASON_UNKNOWN;
	if (uses_zero_page && !(flags_of(vmf) & FAULT_FLAG_WRITE))
		return REASON_THP_ZERO;
	return REASON_THP;
}

static __always_inline int thp_fault_ends(struct fault_key *key, __u32 result)
{
	if (result & (VM_FAULT_FAILED | VM_FAULT_RETRY) || key->reason == REASON_UNKNOWN)
		return 0;
	if (result & VM_FAULT_FALLBACK)
		key->reason = REASON_THP_FALLBACK;
	count_add(counts, key, 1);
	return 0;
}

SEC("?fexit/do_huge_pmd_anonymous_page")
int BPF_PROG(thp_fexit, struct vm_fault *vmf, unsigned int result)
{
	struct fault_key key = {};

	if (!begin(&key))
		return 0;
	key.reason = thp_reason(vmf);
	return thp_fault_ends(&key, result);
}

SEC("?kprobe/do_huge_pmd_anonymous_page")
int BPF_KPROBE(thp_kprobe, struct vm_fault *vmf)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct fault fault = {};

	if (!begin(&fault.key))
		return 0;
	fault.key.reason = thp_reason(vmf);
	begin_call(&faults, thread, &fault);
	return 0;
}

SEC("?kretprobe/do_huge_pmd_anonymous_page")
int BPF_KRETPROBE(thp_kretprobe, unsigned int result)
{
	struct fault fault;

	if (!take_fault(&fault))
		return 0;
	return thp_fault_ends(&fault.key, result);
}

/*
 * Returns the order of a folio: the binary logarithm of its number of small pages; 6.6 and later.
 * The first word of a folio is its flags. The first word of its second page, instead of flags,
 * has the order in its lowest byte.
 */
static __always_inline __u32 order_of(__u64 flags, void *folio)
{
	__u64 word = 0;

	if (!(flags & 1ULL << bpf_core_enum_value(enum pageflags, PG_head)))
		return 0;
	bpf_probe_read_kernel(&word, sizeof(word), folio + bpf_core_type_size(struct page));
	return word & 0xff;
}

static __always_inline int huge_page_is_given(__u32 page_shift, enum reason reason)
{
	struct fault_key key = {};

	if (!begin(&key))
		return 0;
	key.page_shift = page_shift;
	key.reason = reason;
	count_add(counts, &key, 1);
	return 0;
}

/*
 * Counts a new anonymous folio that is mapped. A folio as large as a huge page is counted where it
 * faults. A folio that comes from swap is locked meanwhile, and is not counted.
 */
static __always_inline int anonymous_folio_is_mapped(void *folio)
{
	__u64 flags = 0;
	__u32 order;

	bpf_probe_read_kernel(&flags, sizeof(flags), folio);
	order = order_of(flags, folio);
	if (!order || order + page_shift_base >= huge_page_shift ||
	    flags & 1ULL << bpf_core_enum_value(enum pageflags, PG_locked))
		return 0;
	return huge_page_is_given(order + page_shift_base, REASON_THP);
}

SEC("?fentry/folio_add_new_anon_rmap")
int BPF_PROG(small_thp_fentry, void *folio)
{
	return anonymous_folio_is_mapped(folio);
}

SEC("?kprobe/folio_add_new_anon_rmap")
int BPF_KPROBE(small_thp_kprobe, void *folio)
{
	return anonymous_folio_is_mapped(folio);
}

/* Counts a folio of shared memory, of any size, or an error in its place. */
static __always_inline int shared_folio_is_allocated(void *folio)
{
	__u64 flags = 0;
	__u32 order;

	if (bpf_probe_read_kernel(&flags, sizeof(flags), folio))
		return 0;
	order = order_of(flags, folio);
	return order ? huge_page_is_given(order + page_shift_base, REASON_THP_SHARED) : 0;
}

SEC("?fexit/shmem_alloc_and_add_folio")
int shmem_alloc_and_add_folio_fexit(void *ctx)
{
	__u64 folio = 0;

	bpf_get_func_ret(ctx, &folio);
	return shared_folio_is_allocated((void *)folio);
}

SEC("?kretprobe/shmem_alloc_and_add_folio")
int BPF_KRETPROBE(shmem_alloc_and_add_folio_kretprobe, void *folio)
{
	return shared_folio_is_allocated(folio);
}

/*
 * Counts a huge page of shared memory, or NULL. Before 6.6 the function allocates huge pages only.
 */
static __always_inline int shared_huge_page_is_allocated(void *page)
{
	return page ? huge_page_is_given(huge_page_shift, REASON_THP_SHARED) : 0;
}

/* clang-format off */
#define SHARED_HUGE_PAGE_PROBES(function)                                                          \
	SEC("?fexit/" #function)                                                                   \
	int BPF_PROG(function##_fexit, unsigned int gfp, void *info, unsigned long index, void *page) \
	{                                                                                          \
		return shared_huge_page_is_allocated(page);                                        \
	}                                                                                          \
	SEC("?kretprobe/" #function)                                                               \
	int BPF_KRETPROBE(function##_kretprobe, void *page)                                        \
	{                                                                                          \
		return shared_huge_page_is_allocated(page);                                        \
	}

SHARED_HUGE_PAGE_PROBES(shmem_alloc_hugefolio)
SHARED_HUGE_PAGE_PROBES(shmem_alloc_hugepage)
/* clang-format on */

SEC("?tracepoint/syscalls/sys_enter_madvise")
int madvise_enter(struct syscall_trace_enter *ctx)
{
	struct fault_key key = {};

	if ((__u32)ctx->args[2] == MADV_HUGEPAGE && begin(&key))
		count_add(counts, &key, 1);
	return 0;
}
