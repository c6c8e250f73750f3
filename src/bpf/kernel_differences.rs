//! Kernel differences: the names and forms of the hooks and structs that the tools use, by kernel version.
//!
//! A tool asks the kernel's BTF what exists, as distributions backport changes. Three checks, marked below, go by the
//! kernel's release. The releases in the tables tell where a difference was met: on Linux 5.10, 6.1, 6.12, 6.18 and
//! 7.2, on which the end-to-end tests run (`make test-vm`). An arrow is followed by the newer name.
//!
//! # Functions
//!
//! | what | is called | where it is chosen |
//! |---|---|---|
//! | a page is read from swap | `swap_readpage(page, …)` until 6.1 → `swap_read_folio(folio, …)`, in 6.12 (c9bdf768dd93) | [`first_name_in_btf`], swapin |
//! | a page is written to swap | `swap_writepage` until 6.12 → `swap_writeout`, in 6.18 | [`first_name_in_btf`], swapin |
//! | shared memory waits for swap | `shmem_swapin_page` → `shmem_swapin_folio`, 5.18 | [`first_name_in_btf`], swapin |
//! | zswap is requested a page | `zswap_load`, 6.6; it returned a bool first, and an errno later | `swapin --zswap`, by the type of the result |
//! | a huge page of the pool is allocated | `alloc_huge_page` → `alloc_hugetlb_folio`, in 6.12 | [`first_name_in_btf`], hfaults |
//! | a reserved huge page is written to | `hugetlb_cow` → `hugetlb_wp`, in 6.1 | [`first_name_in_btf`], hfaults |
//! | shared memory gets a transparent huge page | `shmem_alloc_hugepage` → `shmem_alloc_hugefolio` → `shmem_alloc_and_add_folio` | [`first_name_in_btf`], hfaults |
//! | anonymous memory gets a multi-size THP | `folio_add_new_anon_rmap`, 6.8 | hfaults, where sysfs has several sizes |
//! | objects wait in a sheaf until they are freed by `kfree_rcu()` | `__kfree_rcu_sheaf`, in 6.18 | `memleak -k` |
//! | a program asks which mapping an address is in | `bpf_find_vma()`, 5.17 | ffaults, hfaults and shmsnoop, which without it have a kprobe or less |
//!
//! # Tracepoints
//!
//! | what | differs | where it is chosen |
//! |---|---|---|
//! | reclaim writes a page out | `mm_vmscan_writepage` in 5.10 → `mm_vmscan_write_folio`, in 6.1 | vmscan: whichever can be attached |
//! | direct reclaim begins | arguments `(order, gfp)` until 6.18, `(gfp, order, memcg)` in 7.2 | drsnoop, by the type of the first |
//! | a compaction ends | six arguments in 5.10, five since | `vmscan --trace-compaction`, by their number |
//! | kswapd works | from `mm_vmscan_kswapd_wake` to `_sleep`; in 7.2 `mm_vmscan_balance_pgdat_begin` to `_end` is what it does, without its waiting | `vmscan --kswapd` |
//! | an object is allocated on a node | `kmalloc_node` and `kmem_cache_alloc_node`, until they were merged into `kmalloc` and `kmem_cache_alloc` in 6.1 (11e9734bcb6a) | `memleak -k` |
//! | an object is allocated | the cache is an argument since 6.1, the bytes of a per-CPU allocation since 5.19 | `memleak -k`, by the names of arguments |
//! | a victim of the OOM killer | the argument of `mark_victim` is a pid in 5.10, the task since 6.9 (72ba14deb40a, which stable kernels have, too) | oomkill, by the type of the argument |
//!
//! # How programs run
//!
//! | what | differs | what follows |
//! |---|---|---|
//! | a program on a raw tracepoint | it can be preempted from 7.0 on, and is skipped meanwhile for all other tasks of its CPU | [`preempts_raw_tracepoints`], by the release: programs on tracefs' tracepoints come first there |
//! | a system call's tracepoint | preempted and skipped in 7.2 | `preempts_system_call_programs`: kprobes instead |
//! | a system call's tracepoint | its programs get no kernel stack before 6.12 (376bd59e2a04) | [`system_call_programs_lack_kernel_stacks`], by the release: the raw tracepoints of all system calls for `brkstack -K` |
//! | a raw tracepoint's program that interrupts itself | skipped from 6.1 on | `memleak -k`: two programs on each |
//! | a uprobe | a perf event each, with a cookie from 5.15 on; one link for all from 6.6, and for entry and return from 6.13 | the ladder of memleak ([`attach`]) |
//! | fexit | no more than six arguments before 6.6; no array of pointers among them in 5.10 and 6.1 | kprobes: `swapin --latency`, `memleak -k` |
//! | memory for maps and programs | locked memory before 5.11 | by the release: needs CAP_SYS_RESOURCE or no limit |
//!
//! # Structs
//!
//! | what | differs | where it is read |
//! |---|---|---|
//! | an OOM victim's resident memory | an array of atomics until 6.1, then one of per-CPU counters | `oomkill.bpf.c` |
//! | an object's cache | in `struct page` before 5.17, in `struct slab` since | `memleak_kernel.bpf.c` |
//! | the first page of a compound one | `compound_head` → `compound_info`, in 7.2 | `memleak_kernel.bpf.c` |
//! | the size of a folio | in the second `struct page` of a compound one in 5.10; in the folio since | `swapin.bpf.c`, `hfaults.bpf.c` |
//! | the directory above a cgroup | `kernfs_node.parent` → `__parent`, 6.14 | `cgroup_path.bpf.h` |
//! | flags of a fault | macros in 5.10, an enum with the same values since | `ffaults.bpf.c`, `hfaults.bpf.c` |
//!
//! [`attach`]: crate::bpf::attach
//! [`first_name_in_btf`]: crate::bpf::kernel_support::first_name_in_btf
//! [`preempts_raw_tracepoints`]: crate::bpf::kernel_support::preempts_raw_tracepoints
//! [`system_call_programs_lack_kernel_stacks`]: crate::bpf::kernel_support::system_call_programs_lack_kernel_stacks
