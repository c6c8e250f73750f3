# Objects of CPython that are known to be lost, in use, or left to the garbage collector, which does not run.
#
# 101 objects of Owed have a reference that nobody owns, as from an extension that has forgotten Py_DECREF; each has a
# Part. 53 pairs of Cycle refer to each other, each object with a Member. 1009 objects of Kept are in a list. 7 objects
# of Sole are each in a variable of a function that waits.
#
# The protocol is that of workload.h.
import ctypes
import gc
import os
import sys


class Part:
    pass


class Owed:
    def __init__(self):
        self.part = Part()


class Member:
    pass


class Cycle:
    def __init__(self, other):
        self.other = other
        self.member = Member()


class Kept:
    pass


class Sole:
    pass


def owe():
    for _ in range(101):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(Owed()))


def make_cycles():
    for _ in range(53):
        first = Cycle(None)
        first.other = Cycle(first)


def wipe(depth):
    filler = [None] * 64
    if depth:
        wipe(depth - 1)
    return filler


def wait(depth):
    sole = Sole()
    if depth:
        wait(depth - 1)
    else:
        sys.stdin.readline()
    return sole


gc.collect()
gc.disable()
kept = [Kept() for _ in range(1009)]
owe()
make_cycles()
wipe(100)
print("ready", os.getpid(), flush=True)
wait(6)
print("done", flush=True)
sys.stdin.readline()
