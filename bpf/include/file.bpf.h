/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Files: lookup by descriptor, name, path.
 *
 * The user space side is src/print/file_path.rs.
 */
#ifndef MEMTOOLS_FILE_BPF_H
#define MEMTOOLS_FILE_BPF_H

#include "memtools.bpf.h"

#define FILE_NAME_BYTES 256  /* NAME_MAX, and the NUL */
#define FILE_PATH_BYTES 2048 /* of all names of a path, each with its NUL */
#define FILE_PATH_STEPS 64   /* folders and mounts on the way up */

#define MNT_NS_INTERNAL ((void *)-22) /* namespace of mounts that are in no folder */
#define SB_KERNMOUNT	(1 << 22)     /* a mount of the kernel's own, as for memfd_create(2) */

/*
 * Returns the current task's file with this descriptor, or NULL. No reference is taken: the file
 * can be released at any time.
 */
static __always_inline struct file *file_of_fd(int fd)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task();
	struct fdtable *table = BPF_CORE_READ(task, files, fdt);
	struct file **files = BPF_CORE_READ(table, fd);
	struct file *file = NULL;

	if (fd < 0 || (__u32)fd >= BPF_CORE_READ(table, max_fds))
		return NULL;
	bpf_probe_read_kernel(&file, sizeof(file), &files[fd]);
	return file;
}

/* Copies the file's name without its directories. Returns its length in bytes with the NUL, or 0.
 */
static __always_inline __u32 file_name(struct file *file, char name[FILE_NAME_BYTES])
{
	const unsigned char *from = BPF_CORE_READ(file, f_path.dentry, d_name.name);
	long bytes = bpf_probe_read_kernel_str(name, FILE_NAME_BYTES, from);

	return bytes < 0 ? 0 : bytes;
}

/* State of a walk from a file up to the root of its process's files. */
struct file_walk {
	struct dentry *dentry;
	struct mount *mount;
	struct dentry *root; /* as chroot(2) has set it */
	struct mount *root_mount;
	__u32 bytes;	/* written so far */
	__u32 complete; /* 1: the root was reached, 2: the file is in no folder */
};

static __always_inline struct mount *mount_of(struct vfsmount *mnt)
{
	return (struct mount *)((void *)mnt - bpf_core_field_offset(struct mount, mnt));
}

/*
 * Goes one step up. Returns 0 at the end of the walk. A function of its own that keeps all its
 * changing state in memory: 5.10's verifier forgets the type of a pointer into the ring buffer when
 * the compiler spills it.
 */
static __noinline int file_walk_step(struct file_walk *walk, char *names)
{
	struct dentry *dentry = walk->dentry, *parent;
	struct mount *mount = walk->mount;
	__u32 at = walk->bytes;
	long bytes;

	if (dentry == walk->root && mount == walk->root_mount) {
		walk->complete = 1;
		return 0;
	}
	if (dentry == BPF_CORE_READ(mount, mnt.mnt_root)) {
		walk->mount = BPF_CORE_READ(mount, mnt_parent);
		walk->dentry = BPF_CORE_READ(mount, mnt_mountpoint);
		walk->complete = walk->mount == mount;
		return !walk->complete;
	}
	if (at > FILE_PATH_BYTES - FILE_NAME_BYTES)
		return 0;
	bytes = bpf_probe_read_kernel_str(names + at, FILE_NAME_BYTES,
					  BPF_CORE_READ(dentry, d_name.name));
	if (bytes <= 0)
		return 0;
	walk->bytes = at + bytes;
	parent = BPF_CORE_READ(dentry, d_parent);
	if (parent == dentry) {
		walk->complete = 2;
		return 0;
	}
	walk->dentry = parent;
	return 1;
}

/*
 * Whether a file is the file of a layer that overlayfs has mapped in place of its own. Such a file
 * is on a private copy of the layer's mount. FMODE_BACKING marks it, too, but is not the same bit
 * on all kernels.
 */
static __always_inline bool is_backing_file(struct file *file)
{
	struct mount *mount = mount_of(BPF_CORE_READ(file, f_path.mnt));

	return BPF_CORE_READ(mount, mnt_ns) == MNT_NS_INTERNAL &&
	       !(BPF_CORE_READ(mount, mnt.mnt_sb, s_flags) & SB_KERNMOUNT);
}

/*
 * Returns the path by which the file of overlayfs was opened. A function of its own: inlined, clang
 * computes the offset before the test that the field exists.
 */
static __noinline struct path *path_of_user(struct file *backing)
{
	return (void *)backing + bpf_core_field_offset(struct backing_file, user_path);
}

/* Returns the path by which a file was opened. Up to 6.6, a layer's file itself has that path. */
static __always_inline struct path *path_of(struct file *file)
{
	if (bpf_core_field_exists(struct backing_file, user_path) && is_backing_file(file))
		return path_of_user(file);
	return (void *)file + bpf_core_field_offset(struct file, f_path);
}

/*
 * Copies the names on the way from the file up to the current task's root, each with its NUL.
 * Returns their length in bytes. Sets `complete` to 1 if the names lead to the root, to 2 if the
 * file is in no directory, as of memfd_create(2), and to 0 if names are missing.
 */
static __always_inline __u32 file_path(struct file *file, char names[FILE_PATH_BYTES],
				       __u32 *complete)
{
	struct task_struct *task = (struct task_struct *)bpf_get_current_task();
	struct path *path = path_of(file);
	struct file_walk walk = {
		.dentry = BPF_CORE_READ(path, dentry),
		.mount = mount_of(BPF_CORE_READ(path, mnt)),
		.root = BPF_CORE_READ(task, fs, root.dentry),
		.root_mount = mount_of(BPF_CORE_READ(task, fs, root.mnt)),
	};

	for (int i = 0; i < FILE_PATH_STEPS; i++)
		if (!file_walk_step(&walk, names))
			break;
	*complete = walk.complete;
	return walk.bytes;
}

#endif /* MEMTOOLS_FILE_BPF_H */
