"""Processes that judge answers, a JSON request a line in, a JSON result a line out, and the threads that ask them."""

import json
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class WorkerEnded(Exception):
    """A worker process ended instead of answering.

    Attributes:
        status: as of subprocess: minus the number of the signal that ended it.
    """

    def __init__(self, status: int) -> None:
        super().__init__(f"the worker process ended with status {status}")
        self.status = status


class WorkerPool:
    """Threads that each keep one worker process, started when needed, and send it one request at a time.

    Args:
        name: of the threads.
        workers: how many.
        command: starts a worker.
        environment: its environment variables.
    """

    def __init__(self, name: str, workers: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix=name)
        self._command = list(command)
        self._environment = dict(environment)
        self._workers: dict[int, subprocess.Popen[str]] = {}

    async def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a request. Raises WorkerEnded; the next request gets a new worker."""
        import asyncio  # here, so that a command line is read without it

        return await asyncio.get_running_loop().run_in_executor(self.threads, self.ask, request)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """`answer`, which blocks, and must run in `threads`."""
        me = threading.get_ident()
        worker = self._workers.get(me)
        if worker is None:
            worker = self._workers[me] = self._start_worker()
        assert worker.stdin is not None and worker.stdout is not None, "opened as pipes"
        try:
            worker.stdin.write(json.dumps(request) + "\n")
            worker.stdin.flush()
            result = worker.stdout.readline()
        except BrokenPipeError:
            result = ""
        if not result:
            del self._workers[me]
            raise WorkerEnded(worker.wait())
        return json.loads(result)

    def _start_worker(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=self._environment,
        )

    def close(self) -> None:
        """End the workers. Without it they end by themselves once this process is gone: their input closes."""
        self.threads.shutdown()
        for worker in self._workers.values():
            worker.communicate()
        self._workers.clear()
