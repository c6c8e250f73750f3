// A small library that has everything that is read of a library: symbols and their names, unwind
// rules, calls of other libraries, notes. small.so is built from it:
//
//	g++ -O2 -g0 -shared -fPIC -Wl,--build-id=none,-z,noseparate-code,--hash-style=gnu -o small.so small.cc
#include <cstdlib>
#include <cstring>
#include <map>

namespace small {
template <typename Key> struct Table {
	std::map<Key, Table *> entries;
	__attribute__((noinline)) Table *find(const Key &key)
	{
		auto found = entries.find(key);
		return found == entries.end() ? nullptr : found->second;
	}
};
template struct Table<int>;
} // namespace small

static void *pool;

extern "C" {
__attribute__((noinline)) void *je_malloc(size_t size)
{
	return pool ? pool : malloc(size);
}
void *operator_new(size_t size)
{
	return je_malloc(size);
}
void je_free(void *block)
{
	if (block != pool)
		free(block);
}
__attribute__((noinline)) int deep(int depth, char *text)
{
	char copy[64 * 16];
	memcpy(copy, text, sizeof(copy));
	return depth ? deep(depth - 1, copy) + copy[depth] : copy[0];
}
}
