# Python programs that grow by 23 pairs of objects every 10 ms, after the first line and until there is another.
#
# usage: growing.py cycles|cache|native
#
# cycles: the pairs refer to each other only, and the garbage collector does not run. cache: pairs are held by a
# dictionary, and by 1009 more objects of Record, each of which has a list of 200 items. native: blocks that a C function
# has allocated are lost instead.
#
# The protocol is that of workload.h.
import ctypes
import gc
import os
import select
import sys


class Node:
    pass


class Record:
    def __init__(self):
        self.items = [None] * 200


def pair():
    first, second = Node(), Node()
    first.other, second.other = second, first
    first.text = "x" * 100
    return first


malloc = ctypes.CDLL(None).malloc
# Not an address, which would be an object in memory for a while.
malloc.restype = None
gc.collect()
gc.disable()
cache = {number: Record() for number in range(1009)}
pairs = {}
print("ready", os.getpid(), flush=True)
sys.stdin.readline()
while not select.select([sys.stdin], [], [], 0.01)[0]:
    for _ in range(23):
        if sys.argv[1] == "native":
            malloc(1000)
            continue
        made = pair()
        if sys.argv[1] == "cache":
            pairs[len(pairs)] = made
sys.stdin.readline()
print("done", flush=True)
sys.stdin.readline()
