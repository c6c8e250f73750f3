# Blocks of malloc() that a thread of Python allocates while the kernel makes huge pages of the memory with the thread's
# state, and breaks them up, all the time.
#
#   python3 collapse.py COUNT
#
# The protocol is that of workload.h.
#
# facts: collapses (huge pages that were made)
import ctypes
import os
import queue
import sys
import threading

BYTES = 1009
PAGE = 4096
HUGE_PAGE = 2 << 20
MADV_DONTNEED = 4
MADV_COLLAPSE = 25

libc = ctypes.CDLL(None, use_errno=True)
malloc = libc.malloc
malloc.restype = ctypes.c_void_p
malloc.argtypes = [ctypes.c_size_t]
madvise = libc.madvise
madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

thread_state = ctypes.pythonapi.PyThreadState_Get
thread_state.restype = ctypes.c_void_p

over = False
collapses = 0


# Extends the heap by `pages` huge pages, in blocks that are written to. The blocks are smaller than a
# thread's state, so that none that is freed is reused for a state.
def grow(pages):
    for _ in range(pages * HUGE_PAGE // 272):
        ctypes.memset(malloc(256), 1, 256)


# Returns the address of a page of the heap that is not needed.
def spare_page():
    block = malloc(2 * PAGE)
    ctypes.memset(block, 1, 2 * PAGE)
    return -(-block // PAGE) * PAGE


def take():
    malloc(BYTES)


def work(states, begin, count):
    states.put(thread_state())
    begin.wait()
    for _ in range(count):
        take()


# Giving the spare page back breaks the huge page up.
def collapse(huge, spare):
    global collapses
    while not over:
        if madvise(huge, HUGE_PAGE, MADV_COLLAPSE) == 0:
            collapses += 1
        madvise(spare, PAGE, MADV_DONTNEED)


grow(2)
states, begin = queue.SimpleQueue(), threading.Event()
spares = [spare_page()]
worker = threading.Thread(target=work, args=(states, begin, int(sys.argv[1])))
worker.start()
spares.append(spare_page())
grow(2)
huge = states.get() // HUGE_PAGE * HUGE_PAGE
spare = next(page for page in spares if page // HUGE_PAGE * HUGE_PAGE == huge)
if madvise(huge, HUGE_PAGE, MADV_COLLAPSE):
    sys.exit("cannot make a huge page: %s" % os.strerror(ctypes.get_errno()))
print("ready", os.getpid(), flush=True)
sys.stdin.readline()
collapser = threading.Thread(target=collapse, args=(huge, spare))
collapser.start()
begin.set()
worker.join()
over = True
collapser.join()
print("done collapses=%d" % collapses, flush=True)
sys.stdin.readline()
