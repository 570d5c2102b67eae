"""How often Python's garbage collector runs in a process that reads engines' answers."""

import gc

# What is allocated between two collections of the youngest objects, and how many of those make an older one; Python's
# own are 700, 10, 10.
THRESHOLDS = (100_000, 50, 100)


def collect_rarely() -> None:
    """Spare this process most collections; call it once all modules are loaded.

    An answer is thousands of small lists, which are freed without the collector but make it run: with Python's
    settings once a rollout over every object of every module, for 0.2 s and more in which no request is sent or read.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
