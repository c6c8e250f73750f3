/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Return addresses that pending return probes (uretprobes) have replaced.
 */
#ifndef MEMTOOLS_RETURN_PROBE_BPF_H
#define MEMTOOLS_RETURN_PROBE_BPF_H

#include "memtools.bpf.h"

/* Return probes that a thread can be in at once; the kernel allows 64. */
#define RETURN_PROBES 64

#define KERNEL_ADDRESS (1ULL << 63)

/*
 * Asks a pending return probe (uretprobe), a return_instance of the kernel, for the return address
 * that it has replaced at `address`. Returns that address of the process; otherwise the next probe
 * to ask, an address of the kernel, or 0.
 */
__noinline __u64 stack_ask_return_probe(__u64 probe, __u64 address)
{
	struct return_instance *instance = (void *)probe;

	if (BPF_CORE_READ(instance, stack) == address)
		return BPF_CORE_READ(instance, orig_ret_vaddr);
	return (__u64)BPF_CORE_READ(instance, next);
}

/*
 * Returns the original return address at `address`, which a pending return probe has replaced by
 * its own; 0 if none has.
 */
__noinline __u64 stack_original_return_address(__u64 address)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	__u64 found = (__u64)BPF_CORE_READ(task, utask, return_instances);

	CALL_LOOP (long i = 0; i < RETURN_PROBES && found & KERNEL_ADDRESS; i++)
		found = stack_ask_return_probe(found, address);
	return found & KERNEL_ADDRESS ? 0 : found;
}

#endif /* MEMTOOLS_RETURN_PROBE_BPF_H */
