/* SPDX-License-Identifier: BSD-2-Clause */
/* files COUNT: opens and closes /dev/null, COUNT times. Prints the nanoseconds of a pair. */
#include "bench.h"

STEP static void innermost(void)
{
	for (unsigned long i = 0; i < operations; i++)
		close(open("/dev/null", O_RDONLY));
}

int main(int argc, char **argv)
{
	return bench(argc, argv);
}
