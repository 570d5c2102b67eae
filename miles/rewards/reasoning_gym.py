"""`--rm-type reasoning_gym`: the scorer of the task that the row was made from, of the package reasoning-gym.

Rows are those of `python -m miles.tools.make_prompts --task rg:NAME`: metadata["entry"] is the task's whole entry. The
answer is what the last <answer>...</answer> holds, else all of the response; either behind the last </think>, if there
is one. It is scored in processes of its own (miles.rewards.reasoning_gym_worker), since scorers evaluate it.
"""

import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from miles.rewards.answers import after_thinking
from miles.rewards.reward import Reward
from miles.rewards.sandbox import MEMORY_BYTES, WALL_S, check_sandbox
from miles.rewards.worker_pool import WorkerPool
from miles.utils.errors import UserError

if TYPE_CHECKING:
    from miles.config import RunConfig
    from miles.utils.types import Sample

CPU_S = 5

_WORKER = Path(__file__).with_name("reasoning_gym_worker.py")


def check_installed() -> None:
    """Raise ValueError if reasoning-gym is missing, or can't be locked in here."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError("--rm-type reasoning_gym needs the package reasoning-gym: pip install reasoning-gym==0.1.25")
    check_sandbox()


async def reasoning_gym_reward(config: "RunConfig", sample: "Sample") -> float:
    """What the task says of the answer: 1.0 if it is right, for some tasks less if it is nearly so, 0.0 if not.

    An answer that its scorer can't read, or needs more than CPU_S seconds for, is worth 0.0.

    Raises:
        ValueError: the row has no entry of a task, or one that its scorer can't judge.
        WorkerEnded: the process that scores ended.
    """
    entry = sample.metadata.get("entry")
    if not isinstance(entry, dict) or "source_dataset" not in (entry.get("metadata") or {}):
        raise UserError(
            "the reward reasoning_gym needs the entry of a task in metadata['entry'], as rows have that `python -m "
            "miles.tools.make_prompts --task rg:NAME` writes; the metadata has "
            f"{', '.join(map(repr, sample.metadata)) or 'nothing'}"
        )
    result = await _pool().answer({"entry": entry, "answer": find_answer(sample.response)})
    if "error" in result:
        raise UserError(f"task {entry['metadata']['source_dataset']}: {result['error']}")
    return result["score"]


def find_answer(response: str) -> str:
    """The part of a response that is scored."""
    thought = after_thinking(response)
    text = response if thought is None else thought
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return (text if start < 0 else text[start + len("<answer>") : end]).strip()


@functools.cache
def _pool() -> WorkerPool:
    check_installed()  # a row may choose this reward in a run of another
    spec = importlib.util.find_spec("reasoning_gym")
    assert spec is not None and spec.origin is not None
    packages = Path(spec.origin).parents[1]
    limits = (str(CPU_S), str(WALL_S), str(MEMORY_BYTES))
    return WorkerPool(
        "reasoning-gym-reward",
        max(2, min(16, len(os.sched_getaffinity(0)) // 4)),
        [sys.executable, "-I", "-B", "-X", "utf8", str(_WORKER), str(packages), *limits],
        # One thread: it forks. A home, where matplotlib, which the package imports, keeps what it found out.
        {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HOME": str(Path.home())},
    )


REASONING_GYM = Reward(
    name="reasoning_gym",
    help="the task of the row scores it",
    judge=reasoning_gym_reward,
    check_machine=check_installed,
)
