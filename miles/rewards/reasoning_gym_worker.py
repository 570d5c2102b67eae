"""The process that scores answers to tasks of reasoning-gym: a JSON request a line in, a JSON result a line out.

Some of its scorers evaluate the answer as Python (`eval`, sympy's `parse_expr`). So each answer is scored by a child
that is forked for it, locks itself in as miles.rewards.sandbox_child describes before it reads on, and ends with it:
no network, no processes, no files but Python's packages, limits on CPU time and memory. What the answer does there can
change its own score at most, and no other.

Run as `python -I -B -X utf8 reasoning_gym_worker.py PACKAGES CPU_SECONDS WALL_SECONDS MEMORY_BYTES`; PACKAGES is the
folder that has reasoning_gym.

A request is {"entry", "answer"}. Its result is {"score": a number}, or {"error": text} where the row can't be scored.
An answer that the scorer chokes on, be it an exception, too much time or too much memory, is worth 0 if the scorer can
judge the row's own answer.
"""

import functools
import importlib.util
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

LONGEST_SCORE = 1000  # bytes of what a child says


def score(dataset: Any, entry: dict, answer: str, cpu_s: int, wall_s: float, memory_bytes: int) -> float | str:
    """The dataset's score of an answer, by a child of its own; or what went wrong there."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _score_and_exit(writer, dataset, entry, answer, cpu_s, memory_bytes)
    os.close(writer)
    try:
        said = _read(reader, time.monotonic() + wall_s)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if not said:
        return f"the scorer took more than {cpu_s} s or {memory_bytes >> 20} MiB, or ended early (status {status})"
    text = said.decode(errors="replace")
    # It may be the word of the answer: only a number from 0 to 1 is a score.
    try:
        result = float(text)
    except ValueError:
        return text
    return result if 0 <= result <= 1 else text


def _score_and_exit(writer: int, dataset: Any, entry: dict, answer: str, cpu_s: int, memory_bytes: int) -> None:
    """In the child. It has one open file, and the process that reads it takes one number from it."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for file in (0, 1, 2):
            os.dup2(null, file)
        os.dup2(writer, 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        _sandbox().lock_in(cpu_s, memory_bytes)
        try:
            result = repr(float(dataset.score_answer(answer, entry)))
        except Exception as error:  # whatever a scorer raises is told, and never taken for a score
            result = f"{type(error).__name__}: {error}"[:200]
        os.write(3, result.encode(errors="replace"))
        code = 0
    finally:
        os._exit(code)


def _read(reader: int, deadline: float) -> bytes:
    """What a child wrote until it closed the pipe, cut off at the deadline or when it is too much."""
    said = b""
    while len(said) < LONGEST_SCORE:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            break
        more = os.read(reader, LONGEST_SCORE)
        if not more:
            break
        said += more
    return said


@functools.cache
def _sandbox() -> Any:
    """miles.rewards.sandbox_child, without the package around it, which imports much else."""
    spec = importlib.util.spec_from_file_location("sandbox_child", Path(__file__).with_name("sandbox_child.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def _dataset(name: str) -> Any:
    """The data set with its default settings, as `make_prompts --task rg:NAME` takes it."""
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=0, size=1)


def judge(request: dict, cpu_s: int, wall_s: float, memory_bytes: int) -> dict:
    """The result of a request."""
    entry = request["entry"]
    try:
        dataset = _dataset(entry["metadata"]["source_dataset"])
    except Exception as error:  # whatever the package raises about a name goes back, to be counted as an error
        return {"error": f"{type(error).__name__}: {error}"}
    limits = (cpu_s, wall_s, memory_bytes)
    result = score(dataset, entry, request["answer"], *limits)
    if isinstance(result, str):
        known = "" if entry.get("answer") is None else str(entry["answer"])
        own = score(dataset, entry, known, *limits)
        if isinstance(own, str):
            return {"error": f"the scorer can't judge the row's own answer either: {own}"}
        result = 0.0
    return {"score": result}


def main() -> None:
    """Serve until the input closes."""
    packages, cpu_s, wall_s, memory_bytes = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    # What is here can be read by the children too: nothing that an editable installation has put in.
    ours = [path for path in sys.path if Path(path).is_relative_to(sys.prefix) or path.startswith(sys.base_prefix)]
    sys.path[:] = dict.fromkeys([*ours, packages])
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints does not get between the results
    _sandbox()
    for line in sys.stdin:
        results.write(json.dumps(judge(json.loads(line), cpu_s, wall_s, memory_bytes)) + "\n")
        results.flush()


if __name__ == "__main__":
    main()
