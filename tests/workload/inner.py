# Blocks of an interpreter within another one. Both have functions on the same stack.
#
#   python3 inner.py COUNT   COUNT objects of 2036 bytes, by keep(), which other() calls, in the inner interpreter; outer()
#                            calls other(). inner=1 where a thread's current interpreter can be found, from 3.12 on
#
# The protocol is that of workload.h.
import os
import sys

try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters

INNER = """
kept = []
def keep(count):
    for i in range(count):
        kept.append(bytes(2003))
def other(count):
    keep(count)
"""


def run(inner, source):
    execute = getattr(interpreters, "exec", None) or interpreters.run_string
    execute(inner, source)


def outer(inner, count):
    run(inner, "other(%d)" % count)


count = int(sys.argv[1])
inner = interpreters.create()
run(inner, INNER)
print("ready", os.getpid(), flush=True)
sys.stdin.readline()
outer(inner, count)
print("done inner=%d" % (sys.version_info >= (3, 12)), flush=True)
sys.stdin.readline()
interpreters.destroy(inner)
