# python3 depth.py COUNT DEPTH: malloc and free of 64 bytes, COUNT times, below DEPTH calls of one function. Prints the
# nanoseconds of a pair, of the thread's own time. depth.c and Depth.java do the same.
import ctypes
import os
import sys
import time

libc = ctypes.PyDLL(None)
malloc, free = libc.malloc, libc.free
malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
free.restype, free.argtypes = None, [ctypes.c_void_p]


def descend(depth, operations):
    if depth > 0:
        return descend(depth - 1, operations)
    begin = time.thread_time_ns()
    for _ in range(operations):
        free(malloc(64))
    return time.thread_time_ns() - begin


count, deep = map(int, sys.argv[1:])
print("ready", os.getpid(), flush=True)
sys.stdin.readline()
# The first stacks are walked while memleak still looks for the interpreter.
descend(deep, 1009)
time.sleep(0.5)
print("done ns=%.1f" % (descend(deep, count) / count), flush=True)
sys.stdin.readline()
