// SPDX-License-Identifier: BSD-2-Clause
/*
 * Reads the page tables of a process for src/heap/idle. Their entries say which pages have been
 * used; no file of /proc reports that page by page.
 *
 * Hooks: none. User space runs both programs itself (BPF_PROG_TEST_RUN), with arguments in place of
 * a tracepoint's. They only read.
 */
#include "memtools.bpf.h"
#include "page_tables.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

EXPORT_TYPE(enum page_tables_sizes);
EXPORT_TYPE(struct page_tables);

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct page_tables);
} page_tables SEC(".maps");

static __always_inline struct page_tables *tables(void)
{
	__u32 first = 0;

	return bpf_map_lookup_elem(&page_tables, &first);
}

/*
 * Finds the root of a process's page tables. args[0] is a file descriptor of the tool's, of the
 * process's pagemap: the kernel keeps the process's mm with that open file. Returns 0, or 1 if
 * there is none.
 */
SEC("raw_tp")
int page_table_root(struct bpf_raw_tracepoint_args *ctx)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct page_tables *to = tables();
	struct file **files, *file = NULL;
	struct mm_struct *mm;

	if (!to)
		return 1;
	to->root = 0;
	files = BPF_CORE_READ(task, files, fdt, fd);
	if (bpf_core_read(&file, sizeof(file), files + ctx->args[0]) || !file)
		return 1;
	mm = BPF_CORE_READ(file, private_data);
	to->root = (__u64)BPF_CORE_READ(mm, pgd);
	return !to->root;
}

/*
 * Copies args[0] page tables, from the addresses in `address`. The address of a table that cannot
 * be read is set to 0.
 */
SEC("raw_tp")
int page_tables_read(struct bpf_raw_tracepoint_args *ctx)
{
	struct page_tables *to = tables();
	__u32 count = ctx->args[0];
	__u32 i;

	if (!to)
		return 1;
	for (i = 0; i < PAGE_TABLES_AT_ONCE; i++) {
		if (i >= count)
			break;
		if (bpf_probe_read_kernel(&to->table[i], sizeof(to->table[i]),
					  (void *)to->address[i]))
			to->address[i] = 0;
	}
	return 0;
}
