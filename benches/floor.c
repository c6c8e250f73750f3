/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Measures the least that a tool can cost: attaches a program that does nothing to probes, until it
 * is killed.
 *
 * floor PID FILE PLACE...     uprobes in a process. A PLACE is an offset in the
 *                             file, with an r before it for a function's return.
 * floor TRACEPOINT            a tracepoint, as category/name, of all processes
 * floor TRACEPOINT stack      the same; the program asks for the user stack with
 *                             bpf_get_stackid(), which follows frame pointers
 */
#include "../tests/workload/workload.h"

#include <linux/bpf.h>
#include <linux/perf_event.h>
#include <stdint.h>
#include <sys/ioctl.h>

/* Capacity of the stack map: more than the stacks of a benchmark. */
#define STACKS 1024

static int bpf(int command, union bpf_attr *attributes)
{
	int fd = syscall(SYS_bpf, command, attributes, sizeof(*attributes));

	if (fd < 0)
		die("bpf(2), command %d: %s", command, strerror(errno));
	return fd;
}

static int load(enum bpf_prog_type type, const struct bpf_insn *instructions, size_t size)
{
	union bpf_attr attributes = {
		.prog_type = type,
		.insns = (uintptr_t)instructions,
		.insn_cnt = size / sizeof(*instructions),
		.license = (uintptr_t) "Dual BSD/GPL",
	};

	return bpf(BPF_PROG_LOAD, &attributes);
}

static int load_nothing(enum bpf_prog_type type)
{
	const struct bpf_insn nothing[] = {
		{ .code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = BPF_REG_0 },
		{ .code = BPF_JMP | BPF_EXIT },
	};

	return load(type, nothing, sizeof(nothing));
}

static int load_stackid(enum bpf_prog_type type)
{
	union bpf_attr map = {
		.map_type = BPF_MAP_TYPE_STACK_TRACE,
		.key_size = sizeof(uint32_t),
		.value_size = PERF_MAX_STACK_DEPTH * sizeof(uint64_t),
		.max_entries = STACKS,
	};
	const struct bpf_insn stackid[] = {
		{ .code = BPF_LD | BPF_DW | BPF_IMM,
		  .dst_reg = BPF_REG_2,
		  .src_reg = BPF_PSEUDO_MAP_FD,
		  .imm = bpf(BPF_MAP_CREATE, &map) },
		{ 0 }, /* second half of the instruction before */
		{ .code = BPF_ALU64 | BPF_MOV | BPF_K,
		  .dst_reg = BPF_REG_3,
		  .imm = BPF_F_USER_STACK },
		{ .code = BPF_JMP | BPF_CALL, .imm = BPF_FUNC_get_stackid },
		{ .code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = BPF_REG_0 },
		{ .code = BPF_JMP | BPF_EXIT },
	};

	return load(type, stackid, sizeof(stackid));
}

/* Returns the first number in a file of the kernel's. */
static unsigned int number_in(const char *path)
{
	FILE *file = fopen(path, "r");
	unsigned int number;

	if (!file || fscanf(file, "%u", &number) != 1)
		die("this kernel has no %s", path);
	fclose(file);
	return number;
}

/*
 * Attaches a program to an event of a process, or of all processes. For all, an event on one CPU is
 * enough: the program runs on all CPUs. Returns false with errno if it cannot be attached.
 */
static bool attach(int program, struct perf_event_attr *attributes, pid_t pid)
{
	int event = syscall(SYS_perf_event_open, attributes, pid, pid < 0 ? 0 : -1, -1, 0);

	return event >= 0 && !ioctl(event, PERF_EVENT_IOC_SET_BPF, program) &&
	       !ioctl(event, PERF_EVENT_IOC_ENABLE, 0);
}

static void attach_uprobe(int program, pid_t pid, const char *path, const char *place)
{
	struct perf_event_attr attributes = {
		.size = sizeof(attributes),
		.type = number_in("/sys/bus/event_source/devices/uprobe/type"),
		.config = *place == 'r', /* bit 0: at the return */
		.uprobe_path = (uintptr_t)path,
		.probe_offset = count(*place == 'r' ? place + 1 : place),
	};

	if (!attach(program, &attributes, pid))
		die("cannot probe %s at %s: %s", path, place, strerror(errno));
}

static void attach_tracepoint(int program, const char *name)
{
	char path[256];
	struct perf_event_attr attributes = {
		.size = sizeof(attributes),
		.type = PERF_TYPE_TRACEPOINT,
	};

	snprintf(path, sizeof(path), "/sys/kernel/tracing/events/%s/id", name);
	attributes.config = number_in(path);
	if (!attach(program, &attributes, -1))
		die("cannot attach to %s: %s", name, strerror(errno));
}

int main(int argc, char **argv)
{
	if (argc == 2) {
		attach_tracepoint(load_nothing(BPF_PROG_TYPE_TRACEPOINT), argv[1]);
	} else if (argc == 3 && !strcmp(argv[2], "stack")) {
		attach_tracepoint(load_stackid(BPF_PROG_TYPE_TRACEPOINT), argv[1]);
	} else if (argc >= 4) {
		int program = load_nothing(BPF_PROG_TYPE_KPROBE);

		for (int i = 3; i < argc; i++)
			attach_uprobe(program, count(argv[1]), argv[2], argv[i]);
	} else {
		usage("PID FILE PLACE... | TRACEPOINT [stack]");
	}
	say("Attached\n", 9);
	pause();
	return 0;
}
