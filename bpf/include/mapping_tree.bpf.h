/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Lookup of a process's mappings up to Linux 6.0, in a red-black tree. The tree is walked without
 * its lock, so a thread that changes it meanwhile can hide a mapping.
 */
#ifndef MEMTOOLS_MAPPING_TREE_BPF_H
#define MEMTOOLS_MAPPING_TREE_BPF_H

#include "memtools.bpf.h"

/*
 * Maximum depth of a tree of 2^16 mappings, the limit of a process: twice that of a balanced tree.
 */
#define MAPPING_TREE_LEVELS 34

struct vm_area_struct___rb {
	struct rb_node vm_rb;
};

struct mm_struct___rb {
	struct rb_root mm_rb;
};

static __always_inline struct vm_area_struct *mapping_of_node(struct rb_node *node)
{
	return (void *)node - bpf_core_field_offset(struct vm_area_struct___rb, vm_rb);
}

/*
 * Returns the mapping that contains this address, a struct vm_area_struct, or 0. No lock or
 * reference is taken.
 */
__noinline __u64 mapping_in_tree(__u64 mm, __u64 address)
{
	struct mm_struct___rb *with_tree = (void *)mm;
	struct rb_node *node;

	if (!bpf_core_field_exists(with_tree->mm_rb))
		return 0;
	node = BPF_CORE_READ(with_tree, mm_rb.rb_node);

	for (int i = 0; i < MAPPING_TREE_LEVELS && node; i++) {
		struct vm_area_struct *vma = mapping_of_node(node);

		if (address < BPF_CORE_READ(vma, vm_start))
			node = BPF_CORE_READ(node, rb_left);
		else if (address >= BPF_CORE_READ(vma, vm_end))
			node = BPF_CORE_READ(node, rb_right);
		else
			return (__u64)vma;
	}
	return 0;
}

#endif /* MEMTOOLS_MAPPING_TREE_BPF_H */
