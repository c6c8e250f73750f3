/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * The ring buffer through which a tool's events reach user space.
 *
 * Waking the reader costs several microseconds, an order of magnitude more than the event. The
 * kernel wakes the reader only for an event that finds the buffer read to its end, so the reader
 * leaves the buffer alone for some milliseconds after each look (src/run/poll.rs): a single event
 * is seen at once, a burst costs one wake-up per look. The buffer must hold the events of one such
 * pause.
 *
 * 2 MB hold 5,500 of mmapsnoop's events with a file's name: half a million events a second, with a
 * pause of 10 ms. The buffer is mapped twice, so that no record is split, and counts twice as the
 * tool's memory.
 */
#ifndef MEMTOOLS_EVENT_BPF_H
#define MEMTOOLS_EVENT_BPF_H

#include "memtools.bpf.h"

#define EVENT_BUFFER_BYTES (2 << 20)

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, EVENT_BUFFER_BYTES);
} events SEC(".maps");

/*
 * Reserves space for one event. Returns NULL, and counts a lost event, if the ring buffer is full.
 */
static __always_inline void *event_reserve(__u64 size)
{
	void *event = bpf_ringbuf_reserve(&events, size, 0);

	if (!event)
		count_loss(events);
	return event;
}

#endif /* MEMTOOLS_EVENT_BPF_H */
