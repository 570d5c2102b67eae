"""`--rm-type math`: the same value as the label, judged by the package math-verify in processes of its own.

Worker processes, because sympy may compute for hours inside one call: the kernel ends a worker that used up its time
for one answer, wherever it is, and whatever thread asked.
"""

import asyncio
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from miles.config import RunConfig
from miles.utils.types import Sample

TIME_LIMIT_S = 5.0


class MathTimeout(Exception):
    """Judging one response took longer than it may."""


def check_installed() -> None:
    """Raise ValueError if math-verify is missing."""
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("--rm-type math needs the package math-verify: pip install math-verify")


async def math_reward(config: RunConfig, sample: Sample) -> float:
    """1.0 if the last answer in the response has the label's value, 0.0 if not or if there is none.

    Which answer counts and what is equal: see miles.rewards.math_worker.

    Raises: ValueError if the label can't be read as mathematics; MathTimeout.
    """
    return await judge(sample.label, sample.response)


async def judge(label: str, response: str) -> float:
    """`math_reward` of two texts."""
    loop = asyncio.get_running_loop()
    pool = _pool()
    return await loop.run_in_executor(pool.threads, pool.judge, label, response)


@functools.cache
def _pool() -> "MathPool":
    return MathPool(workers=max(2, min(32, len(os.sched_getaffinity(0)) // 4)), time_limit_s=TIME_LIMIT_S)


class MathPool:
    """Threads that each keep one worker process and send it one response at a time.

    time_limit_s: CPU seconds of the worker for one response, so that a busy machine fails no good answer.
    """

    def __init__(self, workers: int, time_limit_s: float) -> None:
        self.threads = ThreadPoolExecutor(workers, thread_name_prefix="math-reward")
        self._time_limit_s = time_limit_s
        self._workers: dict[int, subprocess.Popen[str]] = {}

    def judge(self, label: str, response: str) -> float:
        """The reward of one response; blocks, and must run in `threads`.

        Raises: ValueError for a label that can't be read, MathTimeout, RuntimeError if the worker died otherwise.
        """
        worker = self._workers.get(threading.get_ident())
        if worker is None:
            worker = self._workers[threading.get_ident()] = self._start_worker()
        try:
            worker.stdin.write(json.dumps({"label": label, "response": response}) + "\n")
            worker.stdin.flush()
            answer = worker.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            del self._workers[threading.get_ident()]
            code = worker.wait()
            if code == -signal.SIGPROF:
                raise MathTimeout(f"took more than {self._time_limit_s:g} s of CPU time, label {label!r}")
            raise RuntimeError(f"the math worker ended with status {code}, label {label!r}")
        result = json.loads(answer)
        if "error" in result:
            raise ValueError(result["error"])
        return result["reward"]

    def _start_worker(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "miles.rewards.math_worker", str(self._time_limit_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def close(self) -> None:
        """End the workers. Without it they end by themselves once this process is gone: their input closes."""
        self.threads.shutdown()
        for worker in self._workers.values():
            worker.communicate()
        self._workers.clear()
