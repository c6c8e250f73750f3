/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Lookup of the code at an address of the current process: the mapping, and the file that is
 * mapped.
 *
 * The kernel's own tree of mappings is walked without its lock. bpf_find_vma() would take the lock,
 * or fail while a thread maps memory, and exists since 5.17 only. The tree may change meanwhile:
 * memory is read through helpers that cannot fault, and a result counts only if its own fields say
 * that it is a mapping of this process that contains this address. Otherwise the search is
 * repeated, once.
 *
 * Up to 6.0 the tree is a red-black tree; since then (commit d4af56c5c7c6, "mm: start tracking VMAs
 * with maple tree") a maple tree, whose nodes have up to 16 children.
 */
#ifndef MEMTOOLS_MAPPING_BPF_H
#define MEMTOOLS_MAPPING_BPF_H

#include "arch_memory.bpf.h"
#include "mapping_tree.bpf.h"

/*
 * Identity of a mapped file and of its contents. All zero for memory of no file. For the vdso,
 * `inode` is the address of the kernel's copy, and `device` is 0.
 */
struct mapping_file {
	__u64 inode;
	__u64 size;
	__u64 changed; /* last change of the contents, a mix of seconds and nanoseconds */
	__u32 device;
	__u32 generation; /* tells files apart that have had the same inode number */
};

/* Mapping that was found last. */
struct mapping {
	__u64 start;
	__u64 end;
	__u64 base; /* subtracted from an address, gives the offset in the file */
	__u64 executable;
	struct mapping_file file;
	__u64 node[16]; /* scratch: a node of the tree */
};

/*
 * Results of lookups: one for each slot for a stack, which only the holder of the slot writes to,
 * and behind them one for user space, whose number is stack_slot_count. Functions take the number
 * of the result: with scalars in and out they can be global, and the verifier follows each of them
 * once.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2); /* src/stacks/slots.rs sets the number */
	__type(key, __u32);
	__type(value, struct mapping);
} mappings SEC(".maps");

/*
 * Levels of the maple tree: a node has at least four children, in a balanced tree at least eight.
 */
#define MAPPING_MAPLE_LEVELS 8
#define MAPPING_EXECUTABLE   4 /* VM_EXEC */

/*
 * inode of 6.7 (commit 12cd44023651) to 6.10. Since 6.11 the time is in two fields (3aa63a569c64).
 */
struct inode___wrapped {
	struct timespec64 __i_mtime;
};

struct inode___plain {
	struct timespec64 i_mtime;
};

/* A pointer to a node has the node's type in the bits that its alignment leaves. */
#define MAPLE_POINTER_BITS    255ULL
#define MAPLE_TYPE_SHIFT      3
#define MAPLE_TYPE_BITS	      15
#define MAPLE_LEAF	      1
#define MAPLE_RANGE	      2
#define MAPLE_RANGE_WITH_GAPS 3

/*
 * Goes one step down the maple tree, to the child for `address`. A node has the last address of
 * each of its children except the last child. The child is the first whose last address is not less
 * than `address`.
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
 * Returns the root of the maple tree of an mm_struct; 0 if the kernel has none. A function of its
 * own, with a barrier: otherwise clang computes the field's address before the test that the field
 * exists, and programs do not load on kernels without it.
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

/*
 * Describes the mapping that was found. Returns 0 if it is not one of this process that contains
 * this address.
 */
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
		mapping->base -= BPF_CORE_READ(vma, vm_pgoff) << PAGE_SHIFT;
		mapping_describe_file(&mapping->file, inode);
	} else if (mapping->start == (__u64)BPF_CORE_READ(mm, context.vdso)) {
		mapping->file.inode = vdso_of(mm);
	}
	return 1;
}

/* Finds the mapping that contains the address. Returns NULL if there is none. */
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
