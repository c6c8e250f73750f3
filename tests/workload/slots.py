"""slots.py FILE: make and free objects of all sizes, in threads too, while a forked child frees its copies of
them. At the end, write the slots of pymalloc that are in use to FILE (sys._debugmallocstats()), and exit
without a last collection of garbage."""
import gc
import os
import sys
import threading

ROUNDS = 101


class Node:
    pass


def work(kept):
    for number in range(ROUNDS):
        made = {"key%d" % key: [key, str(key), key / 7] for key in range(number % 41)}
        if number % 7 == 0:
            kept.append(made)
        node = Node()
        node.self = node
        kept.append([node, "x" * (5 * number), b"y" * (600 - 5 * number), (number,) * (number % 59)])
        kept.append(sorted(str(word) for word in made.items()))
        if number % 11 == 0:
            del kept[: len(kept) // 2]


kept = [[] for _ in range(3)]
threads = [threading.Thread(target=work, args=(own,)) for own in kept[1:]]
for thread in threads:
    thread.start()
child = os.fork()
if child == 0:
    del kept, threads
    os._exit(0)
work(kept[0])
for thread in threads:
    thread.join()
os.waitpid(child, 0)
gc.collect()
os.dup2(os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY), 2)
sys._debugmallocstats()
os._exit(0)
