// SPDX-License-Identifier: BSD-2-Clause
/*
 * faults: page faults, by user stack and process.
 *
 * Hook: the software perf event page-faults, or page-faults-maj or -min, at each fault, on all
 * CPUs. These events count the faults that getrusage(2) reports.
 */
#include "filter.bpf.h"
#include "stack_count.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Options, set before load. */
const volatile __u8 user_mode_only;
const volatile __u8 kernel_mode_only;
const volatile __u32 page_bytes = 4096;

SEC("perf_event")
int page_fault(struct bpf_perf_event_data *ctx)
{
	/* The mode follows from the address of the code: the kernel's are in the upper half. */
	bool user_mode = (long)PT_REGS_IP(&ctx->regs) >= 0;
	struct task_ids ids;

	if (user_mode ? kernel_mode_only : user_mode_only)
		return 0;
	if (!filter_wants(&ids))
		return 0;
	return count_stacks(ctx, 1, ids.pid, page_bytes);
}
