"""`--rm-type math`: the same value as the label, judged by the package math-verify in processes of its own.

Worker processes, because sympy may compute for hours inside one call: the kernel ends a worker that used up its time
for one answer, wherever it is, and whatever thread asked.
"""

import functools
import importlib.util
import os
import signal
import sys
from typing import TYPE_CHECKING

from miles.rewards.answers import last_box
from miles.rewards.math_text import read_label
from miles.rewards.reward import Reward, label_of
from miles.rewards.worker_pool import WorkerEnded, WorkerPool
from miles.utils.errors import UserError

if TYPE_CHECKING:
    from miles.config import RunConfig
    from miles.utils.types import Sample

TIME_LIMIT_S = 5.0


class MathTimeout(Exception):
    """Judging one response took longer than it may."""


def check_installed() -> None:
    """Raise ValueError if math-verify is missing."""
    if importlib.util.find_spec("math_verify") is None:
        raise UserError("--rm-type math needs the package math-verify: pip install math-verify")


async def math_reward(config: "RunConfig", sample: "Sample") -> float:
    """1.0 if the last answer in the response has the label's value, 0.0 if not or if there is none.

    Which answer counts: see miles.rewards.math_worker. How it and the label are read: see miles.rewards.math_text.

    Raises:
        ValueError: the label can't be read as mathematics.
        MathTimeout: judging took too long.
    """
    return await judge(label_of(sample), sample.response)


async def boxed_math_reward(config: "RunConfig", sample: "Sample") -> float:
    r"""`math_reward` of the last \boxed or \fbox; 0.0 without one."""
    return await judge_box(label_of(sample), sample.response)


async def judge_box(label: str, text: str) -> float:
    """1.0 if the last box of the text has the label's value, else 0.0.

    Raises:
        ValueError: the label can't be read as mathematics.
        MathTimeout: judging took too long.
    """
    read_label(label)
    box = last_box(text)
    return 0.0 if box is None else await judge(label, rf"\boxed{{{box}}}")


async def judge(label: str, response: str) -> float:
    """`math_reward` of two texts."""
    import asyncio  # here, so that a command line is read without it

    loop = asyncio.get_running_loop()
    pool = _pool()
    return await loop.run_in_executor(pool.threads, pool.judge, label, response)


@functools.cache
def _pool() -> "MathPool":
    return MathPool(workers=max(2, min(32, len(os.sched_getaffinity(0)) // 4)), time_limit_s=TIME_LIMIT_S)


class MathPool(WorkerPool):
    """Workers that judge one response at a time.

    Args:
        workers: how many.
        time_limit_s: CPU seconds of a worker for one response, so that a busy machine fails no good answer.
    """

    def __init__(self, workers: int, time_limit_s: float) -> None:
        command = [sys.executable, "-m", "miles.rewards.math_worker", str(time_limit_s)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        super().__init__("math-reward", workers, command, environment)
        self._time_limit_s = time_limit_s

    def judge(self, label: str, response: str) -> float:
        """The reward of one response; blocks, and must run in `threads`.

        Raises:
            ValueError: the label can't be read.
            MathTimeout: judging took too long.
            RuntimeError: the worker died otherwise.
        """
        try:
            result = self.ask({"label": label, "response": response})
        except WorkerEnded as ended:
            if ended.status == -signal.SIGPROF:
                limit = f"{self._time_limit_s:g} s of CPU time"
                raise MathTimeout(f"took more than {limit}, label {label!r}") from ended
            raise RuntimeError(f"the math worker ended with status {ended.status}, label {label!r}") from ended
        if "error" in result:
            raise UserError(result["error"])
        return result["reward"]


MATH = Reward(
    name="math",
    help="the response has the label's value (package math-verify)",
    judge=math_reward,
    read_label=read_label,
    check_machine=check_installed,
)
BOXED_MATH = Reward(
    name="boxed_math",
    help=r"math of what the last \boxed holds",
    judge=boxed_math_reward,
    read_label=read_label,
    check_machine=check_installed,
)
