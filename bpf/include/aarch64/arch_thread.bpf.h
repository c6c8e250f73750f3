/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Memory of the current thread's own (TLS), on arm64.
 */
#ifndef MEMTOOLS_ARCH_THREAD_BPF_H
#define MEMTOOLS_ARCH_THREAD_BPF_H

#include "current_task.bpf.h"

/* Offset in glibc's `struct pthread` of the thread's values by key: specific_1stblock[].data. */
#define PTHREAD_FIRST_KEY 0x118

/* Offset in glibc's `struct pthread` of the thread's id: _thread_db_pthread_tid. */
#define PTHREAD_ID 0xd0

/*
 * Returns the address of the current thread's `struct pthread` in glibc. It is below the thread
 * pointer, at a distance that differs between versions; and the kernel knows the thread pointer
 * only of threads that it has once taken from a CPU. But the thread has told the kernel where its
 * id is.
 */
static __always_inline __u64 thread_pointer(void)
{
	if (has_current_task_btf())
		return (__u64)bpf_get_current_task_btf()->clear_child_tid - PTHREAD_ID;
	return (__u64)BPF_CORE_READ((struct task_struct *)bpf_get_current_task(), clear_child_tid) -
	       PTHREAD_ID;
}

#endif /* MEMTOOLS_ARCH_THREAD_BPF_H */
