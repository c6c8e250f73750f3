/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Memory of the current thread's own (TLS), on x86-64.
 */
#ifndef MEMTOOLS_ARCH_THREAD_BPF_H
#define MEMTOOLS_ARCH_THREAD_BPF_H

#include "current_task.bpf.h"

/*
 * Offset from the thread pointer of a thread's values by key in glibc, whose `struct pthread`
 * begins at the thread pointer: specific_1stblock[].data.
 */
#define PTHREAD_FIRST_KEY 0x318

/*
 * Returns the base of the current thread's own memory (TLS): a register that user mode seldom
 * changes.
 */
static __always_inline __u64 thread_pointer(void)
{
	if (has_current_task_btf())
		return bpf_get_current_task_btf()->thread.fsbase;
	return BPF_CORE_READ((struct task_struct *)bpf_get_current_task(), thread.fsbase);
}

#endif /* MEMTOOLS_ARCH_THREAD_BPF_H */
