// SPDX-License-Identifier: BSD-2-Clause
/*
 * Allocations of C++ whose outcome is known.
 *
 *   alloc-cxx objects COUNT SIZE  COUNT objects that allocate SIZE bytes in their constructor
 *   alloc-cxx forms COUNT SIZE    each form of operator new leaks COUNT blocks of SIZE bytes, from
 *                                 a function of its own, and each form of operator delete that
 *                                 goes with it frees as many
 */
extern "C" {
#include "workload.h"
}
#include <new>

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

static unsigned long blocks, size;

/* Leaked blocks stay reachable, so that no optimiser drops them. */
static void *volatile kept;

constexpr std::align_val_t alignment{ 64 };

#define FORM(name, allocate, ...)                                                                  \
	STEP static void leak_##name()                                                             \
	{                                                                                          \
		void (*frees[])(void *) = { __VA_ARGS__ };                                         \
                                                                                                   \
		for (unsigned long i = 0; i < blocks; i++) {                                       \
			kept = allocate;                                                           \
			for (auto free : frees) {                                                  \
				free(allocate);                                                    \
				free(nullptr);                                                     \
			}                                                                          \
		}                                                                                  \
	}

#define FREE(call) [](void *block) { call; }

FORM(new, operator new(size), FREE(operator delete(block)), FREE(operator delete(block, size)))
FORM(new_array, operator new[](size), FREE(operator delete[](block)),
     FREE(operator delete[](block, size)))
FORM(new_nothrow, operator new(size, std::nothrow), FREE(operator delete(block, std::nothrow)))
FORM(new_array_nothrow, operator new[](size, std::nothrow),
     FREE(operator delete[](block, std::nothrow)))
FORM(new_aligned, operator new(size, alignment), FREE(operator delete(block, alignment)),
     FREE(operator delete(block, size, alignment)))
FORM(new_array_aligned, operator new[](size, alignment), FREE(operator delete[](block, alignment)),
     FREE(operator delete[](block, size, alignment)))
FORM(new_aligned_nothrow, operator new(size, alignment, std::nothrow),
     FREE(operator delete(block, alignment, std::nothrow)))
FORM(new_array_aligned_nothrow, operator new[](size, alignment, std::nothrow),
     FREE(operator delete[](block, alignment, std::nothrow)))

STEP static void forms()
{
	leak_new();
	leak_new_array();
	leak_new_nothrow();
	leak_new_array_nothrow();
	leak_new_aligned();
	leak_new_array_aligned();
	leak_new_aligned_nothrow();
	leak_new_array_aligned_nothrow();
	__asm__ volatile("");
}

STEP static void objects()
{
	for (unsigned long i = 0; i < blocks; i++) {
		shop::order stays(size), gone(size);
		delete[] gone.items;
	}
}

int main(int argc, char **argv)
{
	const char *what = argc == 4 ? argv[1] : "";

	blocks = argc == 4 ? count(argv[2]) : 0;
	size = argc == 4 ? count(argv[3]) : 0;
	ready();
	if (!strcmp(what, "objects"))
		objects();
	else if (!strcmp(what, "forms"))
		forms();
	else
		usage("objects|forms COUNT SIZE");
	done();
}
