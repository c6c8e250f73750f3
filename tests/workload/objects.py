# Objects of CPython whose types are known.
#
#   python3 objects.py COUNT FILE   COUNT objects of each of some types; FILE gets a line for each object that the
#                                   garbage collector knows or that is made here: its address and its type's name
#
# The protocol is that of workload.h.
import collections
import gc
import os
import re
import sys


class Slots:
    __slots__ = ("first", "second")


class Session:
    def __init__(self, number):
        self.number = number
        self.name = "session %d" % number


class Meta(type):
    pass


class Made(metaclass=Meta):
    pass


class Table(dict):
    pass


def make(number):
    slots = Slots()
    slots.first, slots.second = number * 1.5, str(number) * 3
    yield slots
    yield Session(number)
    yield Made()
    yield Table(key=number)
    yield (number, str(number))
    yield {number, number + 1}
    yield [number]
    yield lambda value, number=number: value
    yield 2 ** (70 + number % 50)
    yield b"x" * (40 + number % 400)
    yield "text %d" % number
    yield number * 1.25
    yield re.match("(a)", "abc")
    yield collections.OrderedDict(key=number)
    yield bytearray(number % 100 + 1)


count, path = int(sys.argv[1]), sys.argv[2]
print("ready", os.getpid(), flush=True)
sys.stdin.readline()
kept = [thing for number in range(count) for thing in make(number)]
# Blocks that were in use and are free again.
junk = [[] for _ in range(20000)]
del junk
gc.collect()
with open(path, "w") as file:
    # Each object is in one of the two lists. Objects that this loop makes are in neither.
    for thing in kept + [thing for thing in gc.get_objects() if thing is not kept]:
        file.write("%x %s\n" % (id(thing), type(thing).__name__))
print("done kept=%d" % len(kept), flush=True)
sys.stdin.readline()
