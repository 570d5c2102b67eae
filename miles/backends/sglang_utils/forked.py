"""Processes of a server that are forked, with all that it has imported, where SGLang would spawn them."""

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from unittest import mock


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Within it a choice of `spawn` by `multiprocessing.set_start_method` is one of `fork`, for this process alone.

    A spawned process imports SGLang anew: 12 s of a core for each of three. A fork is safe where one thread runs, and
    no device is in use: on a CPU SGLang starts its processes first, its threads and sockets later. What the forked
    ones start is spawned, as without us.
    """
    choose = multiprocessing.set_start_method

    def fork(method: str | None, force: bool = False) -> None:
        running = threading.enumerate()
        assert (len(running), method) == (1, "spawn"), f"{method} was chosen with these threads: {running}"
        gc.freeze()  # a collection in a forked process would write to every page that it shares
        choose("fork", force)

    def spawn_from_now_on() -> None:
        choose("spawn", force=True)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # the server's handler ends the server's processes

    os.register_at_fork(after_in_child=spawn_from_now_on)
    with mock.patch.object(multiprocessing, "set_start_method", fork):
        yield
