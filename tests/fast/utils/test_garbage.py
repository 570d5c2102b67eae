import subprocess
import sys

PROGRAM = """
import gc, weakref
from miles.utils.garbage import collect_rarely

collections = []
gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
collect_rarely()
assert gc.get_freeze_count() > 1_000, "modules are frozen"
collections.clear()
for _ in range(20):
    answer = [[-0.5, token, None] for token in range(5_000)]
assert not collections, collections

class Cycle:
    pass

cycle = Cycle()
cycle.itself, gone = cycle, weakref.ref(cycle)
del cycle
kept = [[] for _ in range(300_000)]
assert collections and gone() is None, "what refers to itself is still found"
"""


def test_answers_start_no_collection_and_cycles_are_still_found():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=300)
