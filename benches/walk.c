/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * walk NAME...: reads BPF hash maps key by key, as tools do that know no better way. Prints how
 * many entries all maps of these names had, and how many nanoseconds that took.
 */
#include <linux/bpf.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static long bpf(int command, union bpf_attr *attr)
{
	return syscall(SYS_bpf, command, attr, sizeof(*attr));
}

/* Whether `map` is a hash map of this name. */
static int is_wanted(int map, const char *name)
{
	struct bpf_map_info info = {};
	union bpf_attr attr = {
		.info = { .bpf_fd = map, .info_len = sizeof(info), .info = (unsigned long)&info }
	};

	return !bpf(BPF_OBJ_GET_INFO_BY_FD, &attr) && info.type == BPF_MAP_TYPE_HASH &&
	       !strcmp(info.name, name);
}

static unsigned long walk(int map)
{
	static char key[2][512], value[65536];
	union bpf_attr attr = { .map_fd = map, .next_key = (unsigned long)key[0] };
	unsigned long count = 0;

	while (!bpf(BPF_MAP_GET_NEXT_KEY, &attr)) {
		union bpf_attr lookup = { .map_fd = map,
					  .key = attr.next_key,
					  .value = (unsigned long)value };

		count += !bpf(BPF_MAP_LOOKUP_ELEM, &lookup);
		attr.key = attr.next_key;
		attr.next_key = (unsigned long)key[attr.key == (unsigned long)key[0]];
	}
	return count;
}

int main(int argc, char **argv)
{
	union bpf_attr id = {};
	struct timespec begin, end;
	unsigned long count = 0;

	clock_gettime(CLOCK_MONOTONIC, &begin);
	while (!bpf(BPF_MAP_GET_NEXT_ID, &id)) {
		union bpf_attr open = { .map_id = id.next_id };
		int map = bpf(BPF_MAP_GET_FD_BY_ID, &open);

		for (int i = 1; i < argc && map >= 0; i++)
			if (is_wanted(map, argv[i]))
				count += walk(map);
		if (map >= 0)
			close(map);
		id.start_id = id.next_id;
	}
	clock_gettime(CLOCK_MONOTONIC, &end);
	printf("%lu %lu\n", count,
	       (end.tv_sec - begin.tv_sec) * 1000000000UL + end.tv_nsec - begin.tv_nsec);
	return 0;
}
