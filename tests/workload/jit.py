# Blocks of functions that the interpreter compiles while they run, if it has a compiler.
#
#   PYTHON_JIT=1 python3 jit.py COUNT   COUNT objects of 2036 bytes by one(), which line `called` of hot() calls, and as
#                                       many by line `own` of hot(). compiled=N: number of rounds in compiled code
#
# The protocol is that of workload.h.
import os
import sys

kept = []
jit = getattr(sys, "_jit", None)
is_compiled = jit.is_active if jit else bool


def one():
    return bytes(2003)


def hot(count):
    compiled = 0
    for _ in range(count):
        kept.append(one())
        kept.append(bytes(2003))
        compiled += is_compiled()
    return compiled


print("ready", os.getpid(), flush=True)
sys.stdin.readline()
compiled = hot(int(sys.argv[1]))
called = hot.__code__.co_firstlineno + 3
print("done compiled=%d called=%d own=%d" % (compiled, called, called + 1), flush=True)
sys.stdin.readline()
