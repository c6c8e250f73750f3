# Blocks allocated by greenlets that switch to each other in the middle of their functions.
#
#   python3 greenlets.py FILE   FILE gets the frames of each block as JSON, in the format of frames.py; nothing is
#                               allocated if there is no module greenlet
#
# The protocol is that of workload.h.
import ctypes
import json
import os
import sys

try:
    import greenlet
except ImportError:
    greenlet = None

BYTES = 1009
ROUNDS = 293
PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)

malloc = ctypes.PyDLL(None).malloc
malloc.restype = ctypes.c_void_p
malloc.argtypes = [ctypes.c_size_t]

truth = {}


def note(block, frame):
    frames = []
    while frame is not None:
        frames.append([frame.f_code.co_qualname, frame.f_code.co_filename, frame.f_lineno])
        frame = frame.f_back
    truth[block] = frames


def take():
    note(malloc(BYTES), sys._getframe())


def descend(depth, then):
    if depth:
        # The call goes through a C function, so that another call of the interpreter's loop begins.
        return sorted([0], key=lambda _: descend(depth - 1, then))
    return then()


def take_turns(others):
    for turn in range(ROUNDS):
        take()
        others[turn % len(others)].switch()
        take()


def work():
    main = greenlet.getcurrent()
    first = greenlet.greenlet(lambda: descend(3, lambda: take_turns([main])))
    second = greenlet.greenlet(lambda: descend(1, lambda: take_turns([main, first])))
    descend(2, lambda: take_turns([first, second]))


print("ready", os.getpid(), flush=True)
sys.stdin.readline()
if greenlet:
    work()
with open(sys.argv[1], "w") as file:
    json.dump(truth, file)
print("done blocks=%d" % len(truth), flush=True)
sys.stdin.readline()
