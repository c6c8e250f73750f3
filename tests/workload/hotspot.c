/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * hotspot COUNT [OPTION]: leaks COUNT blocks of 113 bytes from generated code like that of
 * HotSpot's compilers: of two functions, only the outer one has a frame pointer. The program
 * exports the symbols by which HotSpot is recognized, but they describe none of its classes.
 * OPTION has no effect but to be in the process's command line.
 */
#include "workload.h"

static const void *no_entry[16];

/* Symbols that HotSpot exports for debuggers. */
#define EXPORTED(name, value) unsigned long gHotSpotVM##name = value
const void *gHotSpotVMStructs = no_entry, *gHotSpotVMTypes = no_entry;
EXPORTED(StructEntryTypeNameOffset, 0);
EXPORTED(StructEntryFieldNameOffset, 8);
EXPORTED(StructEntryTypeStringOffset, 16);
EXPORTED(StructEntryIsStaticOffset, 24);
EXPORTED(StructEntryOffsetOffset, 32);
EXPORTED(StructEntryAddressOffset, 40);
EXPORTED(StructEntryArrayStride, 48);
EXPORTED(TypeEntryTypeNameOffset, 0);
EXPORTED(TypeEntrySizeOffset, 24);
EXPORTED(TypeEntryArrayStride, 32);

static const unsigned char code[] = {
	0x55,			      /* push %rbp */
	0x48, 0x89, 0xe5,	      /* mov %rsp, %rbp */
	0xe8, 0x02, 0x00, 0x00, 0x00, /* call inner */
	0x5d,			      /* pop %rbp */
	0xc3,			      /* ret */
	/* inner: */
	0x53,	    /* push %rbx */
	0xff, 0xd6, /* call *%rsi */
	0x5b,	    /* pop %rbx */
	0xc3,	    /* ret */
};

int main(int argc, char **argv)
{
	void *(*compiled)(size_t size, void *(*allocate)(size_t size));
	void *at;

	if (argc != 2 && argc != 3)
		usage("COUNT [OPTION]");
	unsigned long blocks = count(argv[1]);

	at = mmap(NULL, PAGE, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1,
		  0);
	if (at == MAP_FAILED)
		die("cannot map memory for code: %s", strerror(errno));
	memcpy(at, code, sizeof(code));
	compiled = (void *(*)(size_t, void *(*)(size_t)))at;
	ready();
	for (unsigned long i = 0; i < blocks; i++)
		compiled(113, malloc);
	done();
	return 0;
}
