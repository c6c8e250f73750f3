/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Programs that replace their own code by a copy of it, in huge pages. The copy has the
 * breakpoints of the probes, for which the kernel knows no probe there: the first of them would end
 * the program. All such programs copy first, and then map something over their code. So a process
 * is stopped, by a signal, when it is about to map over code of a probed file, or to unmap it. User
 * space (tools/memleak/processes/copies.rs) then removes the probes, restores the copy, and lets
 * the process continue.
 */
#ifndef MEMTOOLS_MEMLEAK_COPIES_BPF_H
#define MEMTOOLS_MEMLEAK_COPIES_BPF_H

#include "events.bpf.h"
#include "held.bpf.h"

/* Number of mappings, from the first address on, among which code is looked for. */
#define COPIES_MAPPINGS 4

/* Processes that are stopped, by PID, until they continue: an address of the code. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, HELD_AT_A_TIME);
	__type(key, __u32);
	__type(value, __u64);
} code_stops SEC(".maps");

/*
 * Inodes of the files with probes. Code of other files has no breakpoints: a process that maps and
 * unmaps such code is not delayed. User space compares the device, too.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, __u8);
} probed_inodes SEC(".maps");

/*
 * Stops the current process, which is about to replace code at this address. User space looks at
 * the map from time to time, so that a process whose event is lost continues, too.
 */
static __noinline int copies_stop(__u64 code)
{
	__u32 pid = ids_of_current().pid;
	struct event *event;

	if (!pid || bpf_map_update_elem(&code_stops, &pid, &code, BPF_ANY))
		return 0;
	if (bpf_send_signal(SIGSTOP)) {
		bpf_map_delete_elem(&code_stops, &pid);
		return 0;
	}
	event = event_reserve(sizeof(*event));
	if (!event)
		return 0;
	__builtin_memset(event, 0, sizeof(*event));
	event->kind = EVENT_CODE_REPLACED;
	event->pid = pid;
	bpf_ringbuf_submit(event, 0);
	return 0;
}

/*
 * Returns the end of the mapping at this address, 0 if there is none. The lowest bit is set if the
 * mapping is code of a file with probes.
 */
__noinline __u64 copies_mapping_at(__u32 index, __u64 address)
{
	struct mapping *mapping = mapping_find(index, address);

	if (!mapping)
		return 0;
	if (!mapping->executable || !bpf_map_lookup_elem(&probed_inodes, &mapping->file.inode))
		return mapping->end;
	return mapping->end | 1;
}

/* Returns an address in this range at which probed code is mapped; 0 if there is none. */
static __noinline __u64 copies_code_in(__u64 address, __u64 bytes)
{
	__u32 index = stack_slot_take();
	struct stack_slot *slot = bpf_map_lookup_elem(&stack_slots, &index);
	__u64 at = address, code = 0;

	if (!slot)
		return 0;
	for (int i = 0; i < COPIES_MAPPINGS && !code && at - address < bytes; i++) {
		__u64 end = copies_mapping_at(index, at);

		if (!end)
			break;
		if (end & 1)
			code = at;
		at = end & ~1ULL;
	}
	stack_slot_give_back(slot);
	return code;
}

/* Stops the current process if this range, which is about to be replaced, has probed code. */
static __noinline int copies_replaced(__u64 address, __u64 bytes)
{
	__u64 code = copies_code_in(address, bytes);

	return code ? copies_stop(code) : 0;
}

/*
 * Looks at a call of mmap(), munmap() or mremap(), whichever process makes it: probes that are
 * placed in all processes are in those that the options omit, too.
 */
static __noinline int copies_watch(struct pt_regs *ctx, __u32 kind)
{
	__u64 address = PT_REGS_PARM1(ctx), bytes = PT_REGS_PARM2(ctx);

	barrier_var(address);
	barrier_var(bytes);
	if (kind == FUNCTION_MAP && !(PT_REGS_PARM4(ctx) & MAP_FIXED))
		return 0;
	if (kind == FUNCTION_REMAP && PT_REGS_PARM4(ctx) & MREMAP_FIXED) {
		address = PT_REGS_PARM5(ctx);
		bytes = PT_REGS_PARM3(ctx);
	}
	return copies_replaced(address, bytes);
}

#endif /* MEMTOOLS_MEMLEAK_COPIES_BPF_H */
