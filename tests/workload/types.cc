// SPDX-License-Identifier: BSD-2-Clause
/*
 * Blocks whose types are known.
 *
 *   types COUNT FILE   COUNT objects of each kind; FILE gets a line for each block: its address,
 *                      the bytes that can be used, and its type, or - if the type cannot be known
 *
 * The facts are the number of blocks of each type that an end-to-end test counts.
 */
extern "C" {
#include "workload.h"
}
#include <cxxabi.h>
#include <deque>
#include <list>
#include <malloc.h>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <vector>

/* Block with its true type: a class has its mangled name, any other type a text. */
struct block {
	void *address;
	const std::type_info *of;
	const char *text;
};

static block blocks[1 << 17];
static unsigned long known;

static void note(void *address, const std::type_info *of, const char *text)
{
	if (known == sizeof(blocks) / sizeof(blocks[0]))
		die("more blocks than are noted");
	blocks[known++] = { address, of, text };
}

static void forget(void *address)
{
	for (unsigned long at = known; at-- > 0;) {
		if (blocks[at].address == address) {
			blocks[at] = blocks[--known];
			return;
		}
	}
}

/* Purpose of a container's allocation. */
enum role { TEXT, VECTOR, LIST, TREE, DEQUE, HASH };

static const char *part(role role, bool pointers)
{
	switch (role) {
	case TEXT:
		return "std::string buffer";
	case VECTOR:
		return "std::vector buffer";
	case LIST:
		return "std::list node";
	case TREE:
		return "std::map/set node";
	case DEQUE:
		return pointers ? "std::deque map" : "std::deque node";
	case HASH:
		return pointers ? "std::unordered_map/set buckets" : "std::unordered_map/set node";
	}
	return "-";
}

/* Allocator that records its blocks. It has no members, so that containers have the usual
 * layout. */
template <class T, role R> struct noting {
	using value_type = T;
	template <class U> struct rebind {
		using other = noting<U, R>;
	};
	noting() = default;
	template <class U> noting(const noting<U, R> &)
	{
	}
	T *allocate(size_t count)
	{
		T *memory = static_cast<T *>(malloc(count * sizeof(T)));

		note(memory, nullptr, part(R, std::is_pointer<T>::value));
		return memory;
	}
	void deallocate(T *memory, size_t)
	{
		forget(memory);
		free(memory);
	}
	bool operator==(const noting &) const
	{
		return true;
	}
	bool operator!=(const noting &) const
	{
		return false;
	}
};

namespace shop
{
using text = std::basic_string<char, std::char_traits<char>, noting<char, TEXT>>;
template <class T> using vector = std::vector<T, noting<T, VECTOR>>;

struct hash {
	size_t operator()(const text &text) const
	{
		return std::hash<std::string_view>()(std::string_view(text.data(), text.size()));
	}
};

/* Classes with one base, with several, with a virtual one, and a template. */
struct shape {
	virtual ~shape() = default;
	double x[2] = {};
};
struct circle : shape {
	double radius = 1;
};
struct counted {
	virtual void count()
	{
	}
	long references = 1;
};
struct session : circle, counted {
	text name;
	vector<text> tags;
	std::map<text, int, std::less<text>, noting<std::pair<const text, int>, TREE>> headers;
};
struct shared : virtual shape {
	int key = 0;
};
struct both : virtual counted, shared {
	long more[3] = {};
};
template <class T> struct box : shape {
	T value{};
};
/* The class has no destructor, so an array of it begins with an object. */
struct plain {
	virtual void nothing()
	{
	}
	long value = 0;
};
namespace
{
struct hidden : shape {
};
} // namespace

/* Nothing in a block of this type reveals the type. */
struct pod {
	int a, b;
	long c;
	void *next;
};
/* The record begins with a text, but is not one. */
struct record {
	char tag[16];
	long values[8];
};
} // namespace shop

using namespace shop;

template <class T> static T *make()
{
	T *object = new T;

	/* The address is that of the whole object: its first base is at the same address. */
	note(object, &typeid(T), nullptr);
	return object;
}

/* Root that holds everything. */
static struct {
	vector<shape *> shapes;
	vector<plain *> plains;
	vector<std::shared_ptr<circle>> circles;
	std::list<pod, noting<pod, LIST>> list;
	std::list<int, noting<int, LIST>> *far_list;
	std::set<int, std::less<int>, noting<int, TREE>> numbers;
	std::deque<int, noting<int, DEQUE>> queue;
	std::unordered_map<text, long, hash, std::equal_to<text>,
			   noting<std::pair<const text, long>, HASH>>
	    table;
	vector<void *> others;
} * all;

static text number(const char *before, unsigned long number)
{
	char digits[64];

	snprintf(digits, sizeof(digits), "%s %lu", before, number);
	return text(digits);
}

static void fill_session(session *session, unsigned long i)
{
	session->name = number("a session with a long name", i);
	for (unsigned long tag = 0; tag < i % 5; tag++)
		session->tags.push_back(text(20 + tag, 'a' + tag));
	session->headers["content-type-of-what-follows"] = 1;
	session->headers["host"] = 2;
}

static void make_classes(unsigned long count)
{
	for (unsigned long i = 0; i < count; i++) {
		session *session = make<shop::session>();

		fill_session(session, i);
		all->shapes.push_back(session);
		all->shapes.push_back(make<circle>());
		all->shapes.push_back(make<shared>());
		all->shapes.push_back(make<both>());
		all->shapes.push_back(make<box<int>>());
		all->shapes.push_back(make<box<text>>());
		all->shapes.push_back(make<hidden>());
		all->plains.push_back(make<plain>());
		all->circles.push_back(std::make_shared<circle>());
		/* The control block is before the object, in the same block. */
		note(reinterpret_cast<char *>(all->circles.back().get()) - 16, nullptr,
		     "std::_Sp_counted_ptr_inplace");
	}
	plain *array = new plain[7];
	/* The memory is handed out in parts. An object has the first part. */
	void *slab = malloc(4000);

	note(array, nullptr, "shop::plain[]");
	note(slab, nullptr, "-");
	all->plains.push_back(array);
	all->plains.push_back(new (slab) plain);
}

static void make_others(unsigned long count)
{
	for (unsigned long i = 0; i < count; i++) {
		pod *node = static_cast<pod *>(calloc(1, sizeof(*node)));
		record *record = static_cast<struct record *>(calloc(1, sizeof(*record)));
		char *line = strdup("a line of a configuration file");

		strcpy(record->tag, "short tag text");
		note(node, nullptr, "-");
		note(record, nullptr, "-");
		note(line, nullptr, "text");
		all->others.push_back(node);
		all->others.push_back(record);
		all->others.push_back(line);
		all->list.push_back({ 1, 2, 3, nullptr });
		all->far_list->push_back(i);
		all->numbers.insert(i * 7919 % 100003);
		all->queue.push_back(i);
		all->table[number("the key of an entry", i)] = i;
	}
}

/* Writes the lines of the file, and prints the number of blocks of some types. */
static void tell(const char *path)
{
	FILE *file = fopen(path, "w");

	if (!file)
		die("cannot write to %s: %s", path, strerror(errno));
	for (unsigned long i = 0; i < known; i++) {
		block *block = &blocks[i];
		char *name = NULL;

		if (block->of)
			name = abi::__cxa_demangle(block->of->name(), NULL, NULL, NULL);
		fprintf(file, "%lx %zu %s\n", reinterpret_cast<unsigned long>(block->address),
			malloc_usable_size(block->address), name ? name : block->text);
		free(name);
	}
	fclose(file);
}

static unsigned long of(const char *text)
{
	unsigned long number = 0;

	for (unsigned long i = 0; i < known; i++)
		number += blocks[i].text && !strcmp(blocks[i].text, text);
	return number;
}

int main(int argc, char **argv)
{
	char answer[400];
	int length;

	if (argc != 3)
		usage("COUNT FILE");
	length = snprintf(answer, sizeof(answer), "ready %d\n", getpid());
	say(answer, length);
	wait_for_line();

	all = new std::remove_reference<decltype(*all)>::type();
	note(all, nullptr, "-");
	all->far_list = new std::remove_reference<decltype(*all->far_list)>::type();
	note(all->far_list, nullptr, "-");
	make_classes(count(argv[1]));
	make_others(count(argv[1]));
	tell(argv[2]);
	length = snprintf(
	    answer, sizeof(answer),
	    "done classes=%lu strings=%lu vectors=%lu lists=%lu trees=%lu hashes=%lu\n",
	    count(argv[1]), of("std::string buffer"), of("std::vector buffer"),
	    of("std::list node"), of("std::map/set node"), of("std::unordered_map/set node"));
	say(answer, length);
	wait_for_line();
	return 0;
}
