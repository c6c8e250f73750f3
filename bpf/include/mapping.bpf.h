/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * What code is at an address of the current process: the mapping, and the file
 * that it is of.
 *
 * The kernel's own tree of mappings is gone through, without its lock. bpf_find_vma()
 * would take that, or fail while a thread maps memory, and is of 5.17. The tree may
 * change meanwhile: memory is read through helpers that cannot fault, and what was
 * found counts only if it says itself that it is a mapping of this process
 * with this address in it. Else the search begins anew, once.
 *
 * Up to 6.0 it is a red-black tree; since then (commit d4af56c5c7c6, "mm: start
 * tracking VMAs with maple tree") a maple tree, whose nodes have up to 16 children.
 */
#ifndef MEMTOOLS_MAPPING_BPF_H
#define MEMTOOLS_MAPPING_BPF_H

#include "mapping_tree.bpf.h"

/* Which file, and which contents. Of no file: zero; the vdso, where the kernel keeps it, and no
 * device. */
struct mapping_file {
	__u64 inode;
	__u64 size;
	__u64 changed; /* when its contents were last, a mix of seconds and nanoseconds */
	__u32 device;
	__u32 generation; /* of those that have had the inode's number */
};

/* What was found last. */
struct mapping {
	__u64 start;
	__u64 end;
	__u64 base; /* to be subtracted from an address, to have the byte of the file */
	__u64 executable;
	struct mapping_file file;
	__u64 node[16]; /* a node of the tree, meanwhile */
};

/*
 * One for each slot of the stack table, so that nobody else writes to it, and one
 * for user space. Functions are given its number: scalars in and out, so that
 * they can be global and the verifier follows each of them once.
 */
#define MAPPINGS      257
#define MAPPING_OF_US 256

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAPPINGS);
	__type(key, __u32);
	__type(value, struct mapping);
} mappings SEC(".maps");

/* A node has four children or more, that of a balanced tree with eight at least. */
#define MAPPING_MAPLE_LEVELS 8
#define MAPPING_EXECUTABLE   4 /* VM_EXEC */
#define MAPPING_PAGE_SHIFT   12

/* Since 6.7, up to 6.10 (commit 3aa63a569c64); since then in two fields (16a94965324e). */
struct inode___wrapped {
	struct timespec64 __i_mtime;
};

struct inode___plain {
	struct timespec64 i_mtime;
};

/* A pointer to a node has its type in the bits that its alignment leaves. */
#define MAPLE_POINTER_BITS    255ULL
#define MAPLE_TYPE_SHIFT      3
#define MAPLE_TYPE_BITS	      15
#define MAPLE_LEAF	      1
#define MAPLE_RANGE	      2
#define MAPLE_RANGE_WITH_GAPS 3

/*
 * One step down the maple tree. A node has the last address of each of its children,
 * but of the last one, and so does the tree of memory: the first that is not
 * less than ours.
 */
__noinline __u64 mapping_maple_step(__u32 index, __u64 entry, __u64 address)
{
	struct mapping *mapping = bpf_map_lookup_elem(&mappings, &index);
	__u64 node = entry & ~MAPLE_POINTER_BITS, child = 0;
	__u32 type = entry >> MAPLE_TYPE_SHIFT & MAPLE_TYPE_BITS, pivots, slots, count, i;

	if (!mapping || !bpf_core_type_exists(struct maple_range_64))
		return 0;
	slots = bpf_core_field_offset(struct maple_range_64, slot);
	pivots = bpf_core_field_offset(struct maple_range_64, pivot);
	count = bpf_core_field_size(struct maple_range_64, pivot) / 8;
	if (type == MAPLE_RANGE_WITH_GAPS) {
		slots = bpf_core_field_offset(struct maple_arange_64, slot);
		pivots = bpf_core_field_offset(struct maple_arange_64, pivot);
		count = bpf_core_field_size(struct maple_arange_64, pivot) / 8;
	}
	if (bpf_probe_read_kernel(mapping->node, 15 * 8, (void *)(node + pivots)))
		return 0;
	for (i = 0; i < 15 && i < count; i++)
		if (mapping->node[i] >= address)
			break;
	bpf_probe_read_kernel(&child, sizeof(child), (void *)(node + slots + 8 * i));
	return child;
}

/*
 * A function of its own, with a barrier: else clang has where the field is computed
 * before it is asked whether it is there, and programs do not load where it is not.
 */
__noinline __u64 mapping_maple_root(__u64 address)
{
	struct mm_struct *mm = (void *)address;

	if (!bpf_core_field_exists(mm->mm_mt))
		return 0;
	barrier();
	return (__u64)BPF_CORE_READ(mm, mm_mt.ma_root);
}

static __always_inline __u64 mapping_in_maple(__u32 index, __u64 mm, __u64 address)
{
	__u64 entry = mapping_maple_root(mm);

	for (int i = 0; i < MAPPING_MAPLE_LEVELS; i++) {
		__u32 type = entry >> MAPLE_TYPE_SHIFT & MAPLE_TYPE_BITS;

		if (type < MAPLE_LEAF || type > MAPLE_RANGE_WITH_GAPS)
			return 0;
		entry = mapping_maple_step(index, entry, address);
		if (type == MAPLE_LEAF)
			return entry;
	}
	return 0;
}

static __always_inline void mapping_describe_file(struct mapping_file *to, struct inode *inode)
{
	struct inode___wrapped *wrapped = (void *)inode;
	struct inode___plain *plain = (void *)inode;
	__u64 seconds, nanoseconds;

	to->inode = BPF_CORE_READ(inode, i_ino);
	to->size = BPF_CORE_READ(inode, i_size);
	to->device = BPF_CORE_READ(inode, i_sb, s_dev);
	to->generation = BPF_CORE_READ(inode, i_generation);
	if (bpf_core_field_exists(inode->i_mtime_sec)) {
		seconds = BPF_CORE_READ(inode, i_mtime_sec);
		nanoseconds = BPF_CORE_READ(inode, i_mtime_nsec);
	} else if (bpf_core_field_exists(wrapped->__i_mtime)) {
		seconds = BPF_CORE_READ(wrapped, __i_mtime.tv_sec);
		nanoseconds = BPF_CORE_READ(wrapped, __i_mtime.tv_nsec);
	} else {
		seconds = BPF_CORE_READ(plain, i_mtime.tv_sec);
		nanoseconds = BPF_CORE_READ(plain, i_mtime.tv_nsec);
	}
	to->changed = seconds << 30 ^ nanoseconds;
}

/* Describe the mapping, if it is one of this process, with this address in it. */
__noinline int mapping_describe(__u32 index, __u64 found, __u64 address)
{
	struct mapping *mapping = bpf_map_lookup_elem(&mappings, &index);
	struct task_struct *task = (void *)bpf_get_current_task();
	struct vm_area_struct *vma = (void *)found;
	struct mm_struct *mm = BPF_CORE_READ(task, mm);
	struct inode *inode;

	if (!mapping || BPF_CORE_READ(vma, vm_mm) != mm)
		return 0;
	mapping->start = BPF_CORE_READ(vma, vm_start);
	mapping->end = BPF_CORE_READ(vma, vm_end);
	if (address < mapping->start || address >= mapping->end)
		return 0;
	mapping->base = mapping->start;
	mapping->executable = BPF_CORE_READ(vma, vm_flags) & MAPPING_EXECUTABLE;
	__builtin_memset(&mapping->file, 0, sizeof(mapping->file));
	inode = BPF_CORE_READ(vma, vm_file, f_inode);
	if (inode) {
		mapping->base -= BPF_CORE_READ(vma, vm_pgoff) << MAPPING_PAGE_SHIFT;
		mapping_describe_file(&mapping->file, inode);
	} else if (mapping->start == (__u64)BPF_CORE_READ(mm, context.vdso)) {
		mapping->file.inode = (__u64)BPF_CORE_READ(mm, context.vdso_image);
	}
	return 1;
}

/* Find what is at the address. NULL if nothing is. */
static __always_inline struct mapping *mapping_find(__u32 index, __u64 address)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct mm_struct *mm = BPF_CORE_READ(task, mm);

	for (int i = 0; i < 2 && mm; i++) {
		__u64 vma;

		if (bpf_core_field_exists(mm->mm_mt))
			vma = mapping_in_maple(index, (__u64)mm, address);
		else
			vma = mapping_in_tree((__u64)mm, address);
		if (vma && mapping_describe(index, vma, address))
			return bpf_map_lookup_elem(&mappings, &index);
	}
	return NULL;
}

static __always_inline __u64 mapping_file_hash(const struct mapping_file *file)
{
	__u64 hash = (file->inode ^ file->changed) * 0x9e3779b97f4a7c15ULL;

	hash = (hash ^ hash >> 32 ^ file->size) * 0xd6e8feb86659fd93ULL;
	return (hash ^ ((__u64)file->device << 32 | file->generation)) | 1;
}

#endif /* MEMTOOLS_MAPPING_BPF_H */
