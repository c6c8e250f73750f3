/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Cgroup (version 2) of a task: its id, and its path. Paths are stored by id for user space
 * (src/process/container.rs), which may ask after the cgroup has been removed.
 */
#ifndef MEMTOOLS_CGROUP_PATH_BPF_H
#define MEMTOOLS_CGROUP_PATH_BPF_H

#include "memtools.bpf.h"

#define CGROUP_FOLDER_BYTES 256	 /* NAME_MAX, and the NUL */
#define CGROUP_PATH_BYTES   1024 /* of all names of a path, each with its NUL */
#define CGROUP_PATH_STEPS   16
#define CGROUP_PATHS	    512

struct cgroup_path {
	__u32 bytes;
	__u32 complete; /* 1: the names lead up to the root */
	char names[CGROUP_PATH_BYTES];
};

const volatile struct cgroup_path no_cgroup_path;

/* Whether cgroups are recorded; set before load. */
const volatile __u8 with_cgroups;

/*
 * Paths of the cgroups that were seen last. An evicted path is stored again at the next event of
 * its cgroup.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, CGROUP_PATHS);
	__type(key, __u64); /* the cgroup's id */
	__type(value, struct cgroup_path);
} cgroup_paths SEC(".maps");

/* kernfs_node up to 6.14; later kernels call the field __parent. */
struct kernfs_node___parent {
	struct kernfs_node *parent;
};

static __always_inline struct kernfs_node *cgroup_parent(struct kernfs_node *node)
{
	struct kernfs_node___parent *old = (void *)node;

	if (bpf_core_field_exists(old->parent))
		return BPF_CORE_READ(old, parent);
	return BPF_CORE_READ(node, __parent);
}

/* State of a walk from a cgroup up to the root. */
struct cgroup_walk {
	struct kernfs_node *node;
	__u32 bytes;	/* of names, written so far */
	__u32 complete; /* 1: the root was reached */
};

/* Goes one step up. Returns 0 at the end of the walk. */
static __noinline int cgroup_walk_step(struct cgroup_walk *walk, char *names)
{
	struct kernfs_node *node = walk->node, *parent = cgroup_parent(node);
	__u32 at = walk->bytes;
	long bytes;

	if (!parent) {
		walk->complete = 1;
		return 0;
	}
	if (at > CGROUP_PATH_BYTES - CGROUP_FOLDER_BYTES)
		return 0;
	bytes =
	    bpf_probe_read_kernel_str(names + at, CGROUP_FOLDER_BYTES, BPF_CORE_READ(node, name));
	if (bytes <= 0)
		return 0;
	walk->bytes = at + bytes;
	walk->node = parent;
	return 1;
}

/*
 * Stores a cgroup's path by its id. Global, with numbers as arguments, so that the verifier follows
 * the function once and not again for each caller.
 */
__noinline int cgroup_path_keep(__u64 id, __u64 node)
{
	struct cgroup_walk walk = { .node = (void *)node };
	struct cgroup_path *path;

	path = value_of(&cgroup_paths, &id, (const void *)&no_cgroup_path);
	if (!path)
		return 0;
	CALL_LOOP (long i = 0; i < CGROUP_PATH_STEPS; i++)
		if (!cgroup_walk_step(&walk, path->names))
			break;
	path->bytes = walk.bytes;
	path->complete = walk.complete;
	return 0;
}

/*
 * Whether a cgroup's complete path is stored. An incomplete path was too long, or another CPU is
 * still writing it.
 */
static __always_inline bool cgroup_path_is_kept(__u64 id)
{
	struct cgroup_path *path = bpf_map_lookup_elem(&cgroup_paths, &id);

	return path && path->complete;
}

static __always_inline struct kernfs_node *cgroup_node(struct task_struct *task)
{
	return BPF_CORE_READ(task, cgroups, dfl_cgrp, kn);
}

/* Returns the id of a task's cgroup, and stores its path; 0 if cgroups are not recorded. */
static __always_inline __u64 cgroup_of(struct task_struct *task)
{
	struct kernfs_node *node;
	__u64 id;

	if (!with_cgroups)
		return 0;
	node = cgroup_node(task);
	id = BPF_CORE_READ(node, id);
	if (!cgroup_path_is_kept(id))
		cgroup_path_keep(id, (__u64)node);
	return id;
}

/*
 * Returns the id of the current task's cgroup as cgroup_of() does. The kernel has a helper for this
 * id, which saves five reads of kernel memory.
 */
static __always_inline __u64 cgroup_of_current(void)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task();
	__u64 id;

	if (!with_cgroups)
		return 0;
	id = bpf_get_current_cgroup_id();
	if (!cgroup_path_is_kept(id))
		cgroup_path_keep(id, (__u64)cgroup_node(task));
	return id;
}

#endif /* MEMTOOLS_CGROUP_PATH_BPF_H */
