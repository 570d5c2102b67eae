"""An event loop that stands still holds up everything in it, time limits too: this says so, and what holds it."""

import asyncio
import logging
import os
import sys
import threading
import time
import traceback

from miles.utils.dotted_path import loaded_in

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 30.0


class LoopWatch:
    """Watches the running event loop, from a thread of its own, until `close`.

    Where the loop does nothing for `patience` seconds, a warning has the stack of its thread and, if one is on it, the
    user's function by flag and path; another follows each time that the waiting has doubled. A loop whose thread has
    ended answers nobody any more: then the process is ended, so that whoever waits for it learns of it.
    """

    def __init__(self, patience: float = PATIENCE_SECONDS) -> None:
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._loops_thread = threading.current_thread()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="loop watch").start()

    def close(self) -> None:
        """Watch no more."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(self._patience / 10):
            answered = threading.Event()
            try:
                self._loop.call_soon_threadsafe(answered.set)
            except RuntimeError:  # the loop is closed
                return
            start, patience = time.monotonic(), self._patience
            while not answered.wait(patience) and not self._closed.is_set() and not self._loop.is_closed():
                waited = time.monotonic() - start
                self._report(waited)
                patience = waited

    def _report(self, waited: float) -> None:
        if not self._loops_thread.is_alive():
            logger.critical(
                "the event loop has ended: a task or a callback in it, such as one that a function of yours began, "
                "raised SystemExit or KeyboardInterrupt (sys.exit)"
            )
            _end_process()
            return
        frame = sys._current_frames().get(self._loops_thread.ident or 0)
        name = loaded_in(frame)
        logger.warning(
            "the event loop has stood still for %.0f s%s; nothing is generated or answered, and no time limit acts. "
            "What blocks (time.sleep, requests, a long computation) belongs into a thread: await asyncio.to_thread(...)"
            "\n%s",
            waited,
            "" if name is None else f" in what {name} names",
            "".join(traceback.format_stack(frame)),
        )


def _end_process() -> None:
    logging.shutdown()
    os._exit(1)
