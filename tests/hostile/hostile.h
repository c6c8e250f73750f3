/* SPDX-License-Identifier: BSD-2-Clause */
/* What the hostile programs share, beside the workloads' protocol. */
#ifndef HOSTILE_H
#define HOSTILE_H

#include "../workload/workload.h"
#include <grp.h>

/* From here on the program is an unprivileged user's. */
static inline void drop_root(void)
{
	if (!getuid() && (setgroups(0, NULL) || setgid(65534) || setuid(65534)))
		die("cannot drop root: %s", strerror(errno));
}

#endif /* HOSTILE_H */
