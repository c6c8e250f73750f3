# Compares the names of two orders COUNT times, by names.c: names of equal lengths, and of different ones.
#
#   python3 shop.py COUNT
#
# The protocol is that of workload.h.
import os
import sys

import names


class Order:
    def __init__(self, name):
        self.name = name

    def __lt__(self, other):
        return names.compare(self.name, other.name) < 0


def in_order(orders):
    return sorted(orders)


def serve(count):
    for _ in range(count):
        in_order([Order("a pound of salt"), Order("a pound of figs")])
        in_order([Order("a pound of salt"), Order("two pounds of figs")])


print("ready", os.getpid(), flush=True)
sys.stdin.readline()
serve(int(sys.argv[1]))
print("done", flush=True)
sys.stdin.readline()
