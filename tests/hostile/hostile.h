/* SPDX-License-Identifier: BSD-2-Clause */
/* Helpers that the hostile programs share, in addition to the workloads' protocol. */
#ifndef HOSTILE_H
#define HOSTILE_H

#include "../workload/workload.h"
#include <grp.h>

/* Makes the program an unprivileged user's from here on. */
static inline void drop_root(void)
{
	if (!getuid() && (setgroups(0, NULL) || setgid(65534) || setuid(65534)))
		die("cannot drop root: %s", strerror(errno));
}

#endif /* HOSTILE_H */
