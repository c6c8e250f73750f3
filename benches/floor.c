/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * floor PID FILE PLACE...: uprobes in a process that run a program that does
 * nothing, until it is killed: what any tool with these probes costs at least.
 * A PLACE is an offset in the file, with an r before it for a function's return.
 */
#include "../tests/workload/workload.h"

#include <linux/bpf.h>
#include <linux/perf_event.h>
#include <stdint.h>
#include <sys/ioctl.h>

static int load(void)
{
	const struct bpf_insn nothing[] = {
		{ .code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = BPF_REG_0 },
		{ .code = BPF_JMP | BPF_EXIT },
	};
	union bpf_attr attributes = {
		.prog_type = BPF_PROG_TYPE_KPROBE,
		.insns = (uintptr_t)nothing,
		.insn_cnt = sizeof(nothing) / sizeof(*nothing),
		.license = (uintptr_t) "Dual BSD/GPL",
	};
	int program = syscall(SYS_bpf, BPF_PROG_LOAD, &attributes, sizeof(attributes));

	if (program < 0)
		die("cannot load a program: %s", strerror(errno));
	return program;
}

/* The type of uprobes among perf events. */
static unsigned int uprobe_type(void)
{
	FILE *file = fopen("/sys/bus/event_source/devices/uprobe/type", "r");
	unsigned int type;

	if (!file || fscanf(file, "%u", &type) != 1)
		die("this kernel has no uprobes");
	fclose(file);
	return type;
}

static void probe(int program, pid_t pid, const char *path, const char *place)
{
	struct perf_event_attr attributes = {
		.size = sizeof(attributes),
		.type = uprobe_type(),
		.config = *place == 'r', /* bit 0: at the return */
		.uprobe_path = (uintptr_t)path,
		.probe_offset = count(*place == 'r' ? place + 1 : place),
	};
	int event = syscall(SYS_perf_event_open, &attributes, pid, -1, -1, 0);

	if (event < 0 || ioctl(event, PERF_EVENT_IOC_SET_BPF, program) ||
	    ioctl(event, PERF_EVENT_IOC_ENABLE, 0))
		die("cannot probe %s at %s: %s", path, place, strerror(errno));
}

int main(int argc, char **argv)
{
	int program;

	if (argc < 4)
		usage("PID FILE PLACE...");
	program = load();
	for (int i = 3; i < argc; i++)
		probe(program, count(argv[1]), argv[2], argv[i]);
	say("Attached\n", 9);
	pause();
	return 0;
}
