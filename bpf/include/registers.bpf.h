/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * The registers with which the current task has last entered the kernel from user
 * mode. They are at the top of its kernel stack.
 *
 * The helpers know where that is since 5.15 (5.11 for the task). On 5.10 we compute
 * it: later kernels can have padding above (CONFIG_X86_FRED), 5.10 has none on
 * x86-64. The test is a constant after relocation, so the verifier never sees the
 * branch whose helpers are not there.
 */
#ifndef MEMTOOLS_REGISTERS_BPF_H
#define MEMTOOLS_REGISTERS_BPF_H

#include "memtools.bpf.h"

#define THREAD_BYTES (16 << 10)

static __always_inline bool has_register_helpers(void)
{
	return bpf_core_enum_value_exists(enum bpf_func_id, BPF_FUNC_task_pt_regs) &&
	       bpf_core_enum_value_exists(enum bpf_func_id, BPF_FUNC_get_current_task_btf);
}

/* Where has_register_helpers(): what it points to may be read as it is. */
static __always_inline struct pt_regs *registers_by_helpers(void)
{
	return (struct pt_regs *)bpf_task_pt_regs(bpf_get_current_task_btf());
}

/* Elsewhere. */
static __always_inline struct pt_regs *registers_on_stack(void)
{
	struct task_struct *task = (void *)bpf_get_current_task();

	return BPF_CORE_READ(task, stack) + THREAD_BYTES - bpf_core_type_size(struct pt_regs);
}

/* Where the current thread has what is its own (TLS): a register that user mode seldom changes. */
static __always_inline __u64 thread_pointer(void)
{
#ifdef __TARGET_ARCH_x86
	/* By the verifier's own loads it takes a tenth of the time. */
	if (bpf_core_enum_value_exists(enum bpf_func_id, BPF_FUNC_get_current_task_btf))
		return bpf_get_current_task_btf()->thread.fsbase;
	return BPF_CORE_READ((struct task_struct *)bpf_get_current_task(), thread.fsbase);
#elif defined(__TARGET_ARCH_arm64)
	return BPF_CORE_READ((struct task_struct *)bpf_get_current_task(), thread.uw.tp_value);
#endif
}

#endif /* MEMTOOLS_REGISTERS_BPF_H */
