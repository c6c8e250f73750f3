// SPDX-License-Identifier: BSD-2-Clause
// alloc-cxx COUNT SIZE: blocks from C++'s operator new, some freed.
extern "C" {
#include "workload.h"
}

namespace shop
{
struct order {
	char *items;
	explicit order(unsigned long size);
};

STEP order::order(unsigned long size) : items(new char[size])
{
}
} // namespace shop

int main(int argc, char **argv)
{
	if (argc != 3)
		usage("COUNT SIZE");
	unsigned long orders = count(argv[1]), size = count(argv[2]);
	ready();
	for (unsigned long i = 0; i < orders; i++) {
		shop::order kept(size), gone(size);
		delete[] gone.items;
	}
	done();
}
