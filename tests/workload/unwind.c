/* SPDX-License-Identifier: BSD-2-Clause */
/*
 * Stacks that can be walked only by unwind information: the program is built without
 * frame pointers, its functions keep their frames in all the ways that compilers have,
 * and code of libraries is in between.
 *
 *   unwind malloc COUNT        COUNT blocks, kept
 *   unwind brk COUNT           COUNT calls of brk(2)
 *   unwind fault COUNT         COUNT pages written to
 *   unwind signal COUNT        COUNT blocks, each from a signal's handler
 *   unwind plugin COUNT        COUNT blocks, each from a library that is loaded after "ready";
 *                              after "done", as many again
 *   unwind threads COUNT       COUNT blocks by each of 16 threads
 *   unwind nested COUNT        COUNT calls of brk(2), each from malloc
 *   unwind fork COUNT          COUNT calls of brk(2) by a child, and as many once the child has
 *                              called exec and was "ready" again
 *   unwind deep COUNT          COUNT calls of brk(2), each below 300 calls of one function
 *   unwind mmap COUNT          COUNT pages mapped
 *   unwind write COUNT         COUNT megabytes written to stderr
 *   unwind grow COUNT          COUNT pages written to after "done", until the program is killed
 *   unwind liar COUNT          COUNT calls of brk(2) below a function that returns to an address
 *                              without code, by its unwind information and its frame pointer
 *   unwind fiber COUNT         COUNT blocks, on a stack of its own, as boost.context makes them
 *   unwind step COUNT          a call of brk(2) after each instruction, by a signal's handler
 *
 * The fact "stack" has the return addresses of the frames, by libgcc's own unwinder, called
 * from the same place as malloc, brk or the write. For step, "stacks" has all of the stacks.
 */
#include "workload.h"

#include <alloca.h>
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <ucontext.h>
#include <unwind.h>

#define THREADS 16
#define DEEP	300
#define FRAMES	512

/* Bit of the flags register that raises a signal after each instruction. */
#define TRAP_FLAG 0x100

static void *volatile kept;
static unsigned long blocks;
static void (*leaf)(void);

static unsigned long stack[FRAMES];
static unsigned frames;
/* Whether the thread leaves it to another thread to record the stack. */
static __thread bool silent;

static _Unwind_Reason_Code add_frame(struct _Unwind_Context *context, void *unused)
{
	(void)unused;
	if (frames < FRAMES)
		stack[frames++] = _Unwind_GetIP(context);
	return _URC_NO_REASON;
}

/* Records the stack. The first frame is this function's own caller, the last one address 0 or
 * _start. */
STEP static void note_stack(void)
{
	if (silent)
		return;
	frames = 0;
	_Unwind_Backtrace(add_frame, NULL);
}

STEP static void leaf_malloc(void)
{
	note_stack();
	kept = malloc(113);
	KEEP(&kept);
}

STEP static void leaf_brk(void)
{
	note_stack();
	syscall(SYS_brk, 0);
	KEEP(&kept);
}

static char *page;

STEP static void leaf_fault(void)
{
	note_stack();
	*(volatile char *)page = 1;
	page += PAGE;
	KEEP(&kept);
}

/* Each block is larger than what the heap has left. */
STEP static void leaf_nested(void)
{
	note_stack();
	kept = malloc(100 << 10);
	KEEP(&kept);
}

STEP static void leaf_mmap(void)
{
	note_stack();
	kept = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	KEEP(&kept);
}

static char megabyte[1 << 20];

STEP static void leaf_write(void)
{
	note_stack();
	if (write(2, megabyte, sizeof(megabyte)) != sizeof(megabyte))
		_exit(1);
	KEEP(&kept);
}

/* Adds the frames as a fact, or as a piece of one. */
static void add_stack(void)
{
	for (unsigned i = 0; i < frames; i++)
		add("%s0x%lx", i ? "," : "", stack[i]);
}

/* Prints the stack in advance, because the program is killed in this function. */
STEP static void leaf_grow(void)
{
	note_stack();
	add(" stack=");
	add_stack();
	done();
	write_pages(page, blocks, PAGE);
	KEEP(&kept);
}

static int compare(const void *a, const void *b)
{
	leaf();
	KEEP(a);
	return *(const int *)a - *(const int *)b;
}

/* Calls through libc, which has no frame pointers either. */
STEP static void through_qsort(void)
{
	int numbers[2] = { 2, 1 };

	qsort(numbers, 2, sizeof(*numbers), compare);
	KEEP(numbers);
}

STEP static void with_alloca(unsigned long bytes)
{
	char *memory = (char *)alloca(bytes);

	memory[bytes / 2] = 1;
	KEEP(memory);
	through_qsort();
	KEEP(memory);
}

STEP static void with_large_frame(unsigned long bytes)
{
	char memory[5000];

	memory[bytes] = 1;
	KEEP(memory);
	with_alloca(bytes);
	KEEP(memory);
}

/* gcc reaches the caller's frame through %r10 and a word on the stack. */
STEP static void with_aligned_frame(unsigned long bytes)
{
	char memory[64] __attribute__((aligned(64)));

	memory[bytes & 63] = 1;
	KEEP(memory);
	with_large_frame(bytes);
	KEEP(memory);
}

/* %rbp and all other registers that survive calls hold numbers. */
STEP static void with_busy_registers(unsigned long a, unsigned long b, unsigned long c,
				     unsigned long d, unsigned long e)
{
	for (unsigned long i = 0; i < 1; i++) {
		with_aligned_frame(a & 127);
		KEEP((a += b, b += c, c += d, d += e, e += a));
	}
	KEEP(a ^ b ^ c ^ d ^ e);
}

STEP static void chain(void)
{
	with_busy_registers(0x1357, 0x2468, 0x369c, 0x48ae, 0x5af1);
	KEEP(&kept);
}

STEP static void recurse(unsigned long calls)
{
	if (calls > 1)
		recurse(calls - 1);
	else
		leaf();
	KEEP(calls);
}

STEP static void deep(void)
{
	recurse(DEEP);
	KEEP(&kept);
}

/* The stacks of all threads look the same. */
static void *thread(void *number)
{
	silent = number;
	for (unsigned long i = 0; i < blocks; i++)
		chain();
	KEEP(&kept);
	return NULL;
}

STEP static void run_threads(void)
{
	pthread_t threads[THREADS];

	for (int i = 0; i < THREADS; i++)
		if (pthread_create(&threads[i], NULL, thread, (void *)(long)i))
			die("cannot start a thread");
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
}

STEP static void on_signal(int signal)
{
	(void)signal;
	chain();
	KEEP(&kept);
}

STEP static void raise_signal(void)
{
	raise(SIGUSR1);
	KEEP(&kept);
}

static void leaf_nothing(void)
{
	KEEP(&kept);
}

/* Calls `what`. By its unwind information and its frame pointer, the function returns to
 * `address`. */
void liar(void (*what)(void), const void *address);
#ifdef __aarch64__
__asm__(".text\n"
	".type liar, %function\n"
	"liar:\n"
	".cfi_startproc\n"
	"sub sp, sp, #48\n"
	".cfi_def_cfa_offset 32\n"
	".cfi_offset 29, -32\n"
	".cfi_offset 30, -24\n"
	"stp x29, x30, [sp, #32]\n"
	"stp xzr, x1, [sp]\n"
	"mov x29, sp\n"
	"blr x0\n"
	"ldp x29, x30, [sp, #32]\n"
	"add sp, sp, #48\n"
	"ret\n"
	".cfi_endproc\n"
	".size liar, . - liar\n");
#else
__asm__(".text\n"
	".type liar, @function\n"
	"liar:\n"
	".cfi_startproc\n"
	"sub $40, %rsp\n"
	".cfi_def_cfa_offset 24\n"
	"mov %rsi, 16(%rsp)\n"
	"mov %rbp, 24(%rsp)\n"
	"movq $0, (%rsp)\n"
	"mov %rsi, 8(%rsp)\n"
	"mov %rsp, %rbp\n"
	"call *%rdi\n"
	"mov 24(%rsp), %rbp\n"
	"add $40, %rsp\n"
	"ret\n"
	".cfi_endproc\n"
	".size liar, . - liar\n");
#endif

#ifdef __aarch64__
/* Only the kernel may have arm64 raise a signal after each instruction. */
STEP static void step(void)
{
	die("user mode cannot step");
}
#else
/* Symbols at the start and the end of the program's own code. */
extern const char __executable_start, etext;

static volatile bool stepping;
/* Whether to step through code outside of the program, too. */
static volatile bool everywhere;

/* Handles a step. The processor takes over the registers that the handler sets. */
static void on_step(int signal, siginfo_t *info, void *context)
{
	greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
	greg_t *flags = &registers[REG_EFL];
	const char *pc = (const char *)registers[REG_RIP];

	(void)signal;
	(void)info;
	if (stepping)
		*flags |= TRAP_FLAG;
	else
		*flags &= ~TRAP_FLAG;
	if (!everywhere && (pc < &__executable_start || pc >= &etext))
		return;
	leaf_brk();
	add_stack();
	add(";");
}

/*
 * Steps through calls. A lazily bound function is bound at its first call, by thousands of
 * instructions, of which only the program's own are of interest.
 */
STEP static void step(void)
{
	struct sigaction action = { .sa_sigaction = on_step, .sa_flags = SA_SIGINFO };

	sigaction(SIGTRAP, &action, NULL);
	add(" stacks=");
	stepping = true;
	raise(SIGTRAP);
	chain();
	everywhere = true;
	chain();
	stepping = false;
	KEEP(&kept);
}
#endif

STEP static void call_plugin(const char *program)
{
	char path[4096];
	void (*through_plugin)(void (*)(void));
	void *library;

	snprintf(path, sizeof(path), "%s-plugin.so", program);
	library = dlopen(path, RTLD_NOW);
	if (!library)
		die("cannot load %s: %s", path, dlerror());
	*(void **)&through_plugin = dlsym(library, "through_plugin");
	for (unsigned long i = 0; i < 2 * blocks; i++) {
		if (i == blocks)
			done();
		through_plugin(chain);
	}
	KEEP(library);
}

STEP static void repeat(void (*what)(void))
{
	for (unsigned long i = 0; i < blocks; i++)
		what();
	KEEP(&kept);
}

/*
 * Makes a tool see this process's stacks until the tool has the tables of all its files. The tool
 * needs a request for a stack after the files were mapped, some milliseconds after the last one.
 */
STEP static void be_looked_at(void)
{
	for (int i = 0; i < 20; i++) {
		usleep(5000);
		syscall(SYS_brk, 0);
	}
}

/* Switches the calling thread to another stack, which was left as this function leaves the
 * present one. */
void switch_stacks(void **from, void *to);
extern const char fiber_end;
#ifdef __aarch64__
/* Words that a stack was left with: x19 to x30, and where to go on. */
#define LEFT_WORDS 14
#define LEFT_FP	   10
#define LEFT_LINK  11
#define LEFT_PC	   12
__asm__(".text\n"
	".type switch_stacks, %function\n"
	"switch_stacks:\n"
	"sub sp, sp, #112\n"
	"stp x19, x20, [sp]\n"
	"stp x21, x22, [sp, #16]\n"
	"stp x23, x24, [sp, #32]\n"
	"stp x25, x26, [sp, #48]\n"
	"stp x27, x28, [sp, #64]\n"
	"stp x29, x30, [sp, #80]\n"
	"str x30, [sp, #96]\n"
	"mov x9, sp\n"
	"str x9, [x0]\n"
	"mov sp, x1\n"
	"ldp x19, x20, [sp]\n"
	"ldp x21, x22, [sp, #16]\n"
	"ldp x23, x24, [sp, #32]\n"
	"ldp x25, x26, [sp, #48]\n"
	"ldp x27, x28, [sp, #64]\n"
	"ldp x29, x30, [sp, #80]\n"
	"ldr x9, [sp, #96]\n"
	"add sp, sp, #112\n"
	"ret x9\n"
	".size switch_stacks, . - switch_stacks\n"
	"fiber_end:\n"
	"brk #1\n");
#else
__asm__(".text\n"
	".type switch_stacks, @function\n"
	"switch_stacks:\n"
	"push %rbp\n"
	"push %rbx\n"
	"push %r12\n"
	"push %r13\n"
	"push %r14\n"
	"push %r15\n"
	"mov %rsp, (%rdi)\n"
	"mov %rsi, %rsp\n"
	"pop %r15\n"
	"pop %r14\n"
	"pop %r13\n"
	"pop %r12\n"
	"pop %rbx\n"
	"pop %rbp\n"
	"ret\n"
	".size switch_stacks, . - switch_stacks\n"
	"fiber_end:\n"
	"hlt\n");
#endif

static void *caller, *fiber;

static void run_fiber(void)
{
	repeat(chain);
	switch_stacks(&fiber, caller);
}

/* Prepares a fiber that returns to fiber_end, with an arbitrary number as its frame pointer. */
STEP static void switch_to_fiber(void)
{
	static unsigned long memory[8192] __attribute__((aligned(16)));
#ifdef __aarch64__
	unsigned long *left = memory + 8192 - LEFT_WORDS;

	left[LEFT_FP] = 1;
	left[LEFT_LINK] = (unsigned long)&fiber_end;
	left[LEFT_PC] = (unsigned long)run_fiber;
	switch_stacks(&caller, left);
#else
	unsigned long *top = memory + 8192 - 3;

	top[0] = (unsigned long)&fiber_end;
	top[-1] = (unsigned long)run_fiber;
	top[-2] = 1;
	switch_stacks(&caller, top - 7);
#endif
	KEEP(&kept);
}

STEP static void fork_and_exec(const char *name, const char *count)
{
	pid_t child = fork();

	if (child == 0) {
		repeat(chain);
		execl("/proc/self/exe", name, "exec", count, (char *)NULL);
		_exit(1);
	}
	if (child < 0 || waitpid(child, NULL, 0) != child)
		die("cannot run a child");
}

int main(int argc, char **argv)
{
	const char *mode = argc == 3 ? argv[1] : "";
	struct sigaction action = { .sa_handler = on_signal };

	if (argc != 3)
		usage("malloc|brk|fault|signal|plugin|threads|nested|fork|deep|mmap|write|grow|"
		      "liar|fiber|step COUNT");
	blocks = count(argv[2]);
	leaf = !strcmp(mode, "brk") || !strcmp(mode, "deep") || !strcmp(mode, "fork") ||
		       !strcmp(mode, "exec")
		   ? leaf_brk
	       : !strcmp(mode, "fault")	 ? leaf_fault
	       : !strcmp(mode, "nested") ? leaf_nested
	       : !strcmp(mode, "mmap")	 ? leaf_mmap
	       : !strcmp(mode, "write")	 ? leaf_write
	       : !strcmp(mode, "grow")	 ? leaf_grow
	       : !strcmp(mode, "step")	 ? leaf_nothing
					 : leaf_malloc;
	if (!strcmp(mode, "exec")) {
		/* Without this the process would be named exe. */
		prctl(PR_SET_NAME, basename(argv[0]));
		be_looked_at();
		ready();
		repeat(chain);
		return 0;
	}
	sigaction(SIGUSR1, &action, NULL);
	mallopt(M_MMAP_THRESHOLD, 1 << 30);
	mallopt(M_TOP_PAD, 0);
	page = map_pages(blocks);
	if (leaf == leaf_brk)
		be_looked_at();
	note_stack();
	ready();
	if (!strcmp(mode, "signal"))
		repeat(raise_signal);
	else if (!strcmp(mode, "plugin"))
		call_plugin(argv[0]);
	else if (!strcmp(mode, "threads"))
		run_threads();
	else if (!strcmp(mode, "fork"))
		fork_and_exec(argv[0], argv[2]);
	else if (!strcmp(mode, "deep"))
		repeat(deep);
	else if (!strcmp(mode, "fiber"))
		switch_to_fiber();
	else if (!strcmp(mode, "step"))
		step();
	else if (!strcmp(mode, "grow"))
		chain();
	else if (!strcmp(mode, "liar"))
		for (unsigned long i = 0; i < blocks; i++)
			liar(leaf_brk, stack);
	else
		repeat(chain);
	add(" stack=");
	add_stack();
	done();
	return 0;
}
