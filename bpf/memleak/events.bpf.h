/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Events for blocks that user space tracks one by one, and for processes that call exec or exit.
 */
#ifndef MEMTOOLS_MEMLEAK_EVENTS_BPF_H
#define MEMTOOLS_MEMLEAK_EVENTS_BPF_H

#include "types.bpf.h"

/* Returns the process of an event. Execs and exits are of the child of a vfork() itself. */
static __noinline __u32 process_of_event(__u32 kind)
{
	if (kind == EVENT_EXEC || kind == EVENT_EXIT)
		return ids_of_current().pid;
	return process_of_current();
}

/* Not inline, to spare the stacks of the callers. */
static __noinline __u32 tid_of_current(void)
{
	return ids_of_current().tid;
}

/* Not inline, like tid_of_current(). */
static __noinline __u64 cgroup_of_event(void)
{
	return cgroup_of_current();
}

static __noinline int emit_sampled(__u32 kind, __u64 address, __u64 size, __u64 stack, __u32 level)
{
	struct event *event = event_reserve(sizeof(*event));

	if (!event)
		return 0;
	event->time_ns = bpf_ktime_get_ns();
	event->address = address;
	event->size = size;
	event->stack = stack;
	event->pid = process_of_event(kind);
	event->tid = tid_of_current();
	event->kind = kind;
	event->level = level;
	event->cgroup = cgroup_of_event();
	bpf_get_current_comm(event->comm, sizeof(event->comm));
	bpf_ringbuf_submit(event, 0);
	return 0;
}

static __always_inline int emit(__u32 kind, __u64 address, __u64 size, __u64 stack)
{
	return emit_sampled(kind, address, size, stack, 0);
}

static int request_overflow(void)
{
	return emit(EVENT_OVERFLOW_FULL, 0, 0, 0);
}

#endif /* MEMTOOLS_MEMLEAK_EVENTS_BPF_H */
