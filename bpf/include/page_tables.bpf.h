/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Request and answer of the programs that read page tables: page_tables.bpf.c.
 */
#ifndef PAGE_TABLES_BPF_H
#define PAGE_TABLES_BPF_H

enum page_tables_sizes {
	PAGE_TABLES_AT_ONCE = 64,
	PAGE_TABLE_ENTRIES = 512,
};

/* Request of user space and answer of a program, which take turns with this memory. */
struct page_tables {
	__u64 root;
	__u64 address[PAGE_TABLES_AT_ONCE]; /* in the kernel's own address space */
	__u64 table[PAGE_TABLES_AT_ONCE][PAGE_TABLE_ENTRIES];
};

#endif /* PAGE_TABLES_BPF_H */
