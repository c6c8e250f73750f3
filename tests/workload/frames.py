# Blocks of malloc() that are allocated at many kinds of places in a Python program.
#
#   python3 frames.py FILE [family]   FILE gets a JSON object: a block's address to its frames, innermost first, each a
#                                     function's qualified name, its file and the line, as sys._getframe() has them
#
# Each place allocates twice: with the GIL held, and released. With "family", two children do the same while this
# process lives: one that is forked (its frames are in FILE.fork), and one that has called exec (FILE.exec).
# The protocol is that of workload.h.
#
# facts: blocks, and with "family" fork and exec, the children's PIDs
import asyncio
import ctypes
import functools
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import weakref

BYTES = 1009
ROUNDS = 293

# Nobody can read memory of which the kernel is making a huge page, so this is disabled here: collapse.py
# tests that. Children inherit the setting.
PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)

with_gil = ctypes.PyDLL(None).malloc
without_gil = ctypes.CDLL(None).malloc
for function in (with_gil, without_gil):
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_size_t]

truth = {}


def note(block, frame):
    frames = []
    while frame is not None:
        code = frame.f_code
        name = getattr(code, "co_qualname", code.co_name)
        frames.append([name, code.co_filename, frame.f_lineno])
        frame = frame.f_back
    truth[block] = frames


def take():
    # The line that allocates is the line that is recorded.
    note(with_gil(BYTES), sys._getframe())
    note(without_gil(BYTES), sys._getframe())
    return 1


def descend(depth):
    return descend(depth - 1) if depth else take()


def generate(depth):
    take()
    if depth:
        yield from generate(depth - 1)
    yield take()


class Thing:
    def __init__(self):
        take()

    def __del__(self):
        take()

    def __eq__(self, other):
        take()
        return False

    def __hash__(self):
        return 1

    def __lt__(self, other):
        take()
        return False

    def __getattr__(self, name):
        take()
        return name

    def __enter__(self):
        take()
        return self

    def __exit__(self, *exception):
        take()
        return True

    def __repr__(self):
        take()
        return "thing"

    @property
    def value(self):
        return take()

    @staticmethod
    def made():
        def inner():
            return take()

        return inner()


COMPARE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))


def called_back(library):
    def compare(one, other):
        take()
        return one[0] - other[0]

    numbers = (ctypes.c_int * 5)(5, 3, 1, 4, 2)
    library.qsort(numbers, 5, ctypes.sizeof(ctypes.c_int), COMPARE(compare))


def fail(depth):
    try:
        if depth == 0:
            raise ValueError(Thing())
        fail(depth - 1)
    finally:
        take()


def caught():
    try:
        fail(7)
    except ValueError:
        take()


def profiled():
    def profile(frame, event, argument):
        if event == "call":
            take()

    sys.setprofile(profile)
    descend(1)
    sys.setprofile(None)


def größe_函数():
    take()


exec("def %s():\n\n    return take()\n" % ("n" * 211))


# Functions that live for one call, so that later functions are at the addresses of earlier ones.
def passing():
    for number in range(ROUNDS):
        names = {"take": take}
        source = "def passing_%d():\n%s    return take()\n" % (number, "\n" * (number % 7))
        exec(compile(source, "<passing %d>" % number, "exec"), names)
        names["passing_%d" % number]()


def places():
    for depth in (0, 1, 2, 7, 13, 31):
        descend(depth)
    list(generate(11))
    sorted([Thing(), Thing(), Thing()])
    [take() for _ in range(2)]
    {Thing(): 1, Thing(): 2}
    Thing().missing
    Thing().value
    Thing.made()
    repr([Thing()])
    with Thing():
        1 / 0
    list(map(lambda _: take(), range(2)))
    functools.reduce(lambda _, __: take(), range(3))
    functools.partial(descend, 3)()
    max([1, 2], key=lambda _: take())
    re.sub("a", lambda _: str(take()), "aaa")
    called_back(ctypes.CDLL(None))
    called_back(ctypes.PyDLL(None))
    caught()
    profiled()
    größe_函数()
    globals()["n" * 211]()
    eval("take()")
    exec("take()")
    thing = Thing()
    watched = weakref.ref(thing, lambda _: take())
    del thing
    cycle = [Thing()]
    cycle.append(cycle)
    del cycle
    gc.collect()
    return watched


class Context:
    async def __aenter__(self):
        take()

    async def __aexit__(self, *exception):
        take()


async def count():
    for number in range(3):
        take()
        yield number


async def wait(depth):
    if depth:
        return await wait(depth - 1)
    take()
    await asyncio.sleep(0)
    return take()


async def tasks():
    await asyncio.gather(*(wait(depth) for depth in range(5)))
    async for _ in count():
        take()
    async with Context():
        take()


# Allocates at all places, and writes down the frames.
def work(path):
    places()
    passing()
    signal.signal(signal.SIGUSR1, lambda *_: take())
    signal.raise_signal(signal.SIGUSR1)
    threads = [threading.Thread(target=places) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(tasks())
    with open(path, "w") as file:
        json.dump(truth, file)


# Forks a child that allocates, and lives until the last copy of the pipe's other end is closed.
def fork(path):
    is_done, done = os.pipe()
    parents, kept = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(kept)
        truth.clear()
        work(path)
        os.write(done, b"1")
        os.read(parents, 1)
        os._exit(0)
    os.read(is_done, 1)
    return pid


# Executes this program again, for FILE alone. The child lives until its stdin is closed.
def execute(path):
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, __file__, path], stdin=pipe, stdout=pipe, text=True)
    child.stdout.readline()
    child.stdin.write("\n")
    child.stdin.flush()
    child.stdout.readline()
    return child


print("ready", os.getpid(), flush=True)
sys.stdin.readline()
work(sys.argv[1])
facts = "blocks=%d" % len(truth)
if sys.argv[2:] == ["family"]:
    executed = execute(sys.argv[1] + ".exec")
    facts += " fork=%d exec=%d" % (fork(sys.argv[1] + ".fork"), executed.pid)
print("done", facts, flush=True)
sys.stdin.readline()
