"""Writes prompts of a task as jsonl: {"input": ..., "label": ..., "metadata": {"task": ...}} a line, all distinct.

Tasks: `reverse` (reverse a string of 3 to 6 digits), `addition` (of two two-digit numbers) and `rg:NAME`, any data set
of the package reasoning-gym, such as rg:chain_sum. There the label is the data set's own answer, or null where it has
no single one, and the metadata has the whole entry, from which the data set's own scorer judges an answer. For
held-out prompts name the training file with --exclude.
"""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from miles.rollout.prompts.prompt_file import BadRow, Problems, open_prompt_file
from miles.tools import run
from miles.utils.errors import UserError

DRAWS_PER_PROMPT = 100


def reverse(seed: int) -> Iterator[tuple[str, str]]:
    """Endless (prompt, answer) pairs: `rev 52831` and `13825`, 3 to 6 digits, each length equally often."""
    draw = random.Random(seed)
    while True:
        digits = "".join(draw.choices("0123456789", k=draw.randint(3, 6)))
        yield f"rev {digits}", digits[::-1]


def addition(seed: int) -> Iterator[tuple[str, str]]:
    """Endless (prompt, answer) pairs: sums of two numbers of two digits."""
    draw = random.Random(seed)
    while True:
        a, b = draw.randint(10, 99), draw.randint(10, 99)
        yield f"What is {a} + {b}? Answer with the number only.", str(a + b)


def reasoning_gym_rows(name: str, seed: int, size: int) -> Iterator[tuple[str, str | None, dict[str, Any]]]:
    """Up to size (question, answer, {"entry": entry}) of a reasoning-gym data set with its default settings.

    Raises: ValueError if the package is missing, the name is unknown, the data set needs settings, or its scorer does
        not understand an entry that was written as JSON.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(f"task rg:{name} needs a package ({error}): pip install reasoning-gym==0.1.25") from error
    if name not in DATASETS:
        raise UserError(f"task rg:{name}: reasoning-gym has no such data set; it has {', '.join(sorted(DATASETS))}")
    try:
        dataset = reasoning_gym.create_dataset(name, seed=seed, size=size)
    except AssertionError as error:  # its way to refuse settings
        raise UserError(f"task rg:{name}: the data set cannot be used as it is: {error}") from error
    for row in range(size):
        entry = dataset[row]
        answer, written = entry["answer"], json.loads(json.dumps(entry))
        if answer is not None and dataset.score_answer(answer, written) != dataset.score_answer(answer, entry):
            raise UserError(f"task rg:{name}: its scorer needs what JSON does not keep, such as tuples; take another")
        yield entry["question"], None if answer is None else str(answer), {"entry": written}


TASKS: dict[str, Callable[[int], Iterator[tuple[str, str]]]] = {"reverse": reverse, "addition": addition}


def make_prompts(task: str, num: int, output: Path, seed: int = 0, exclude: tuple[Path, ...] = ()) -> None:
    """Write num distinct prompts.

    Args:
        task: reverse, addition or rg:NAME.
        num: how many prompts.
        output: .jsonl file to write.
        seed: of the draws; the same seed gives the same file.
        exclude: files written before, whose prompts must not occur again.

    Raises: ValueError for an unknown task, an unreadable excluded file, or a task with fewer distinct prompts than num.
    """
    if num < 1:
        raise UserError(f"--num {num}: at least 1 is needed")
    if output.suffix != ".jsonl":
        raise UserError(f"--output {output}: the name must end in .jsonl")
    seen = set().union(*(_prompts_of(path) for path in exclude))
    limit = (num + len(seen)) * DRAWS_PER_PROMPT
    if task.startswith("rg:"):
        drawn = reasoning_gym_rows(task.removeprefix("rg:"), seed, limit)
    elif task in TASKS:
        drawn = ((prompt, answer, {}) for prompt, answer in TASKS[task](seed))
    else:
        raise UserError(f"--task {task}: allowed are {', '.join(TASKS)} and rg:NAME, a data set of reasoning-gym")
    rows: list[str] = []
    for prompt, answer, more in itertools.islice(drawn, limit):
        if prompt not in seen:
            seen.add(prompt)
            row = {"input": prompt, "label": answer, "metadata": {"task": task, **more}}
            rows.append(json.dumps(row, ensure_ascii=False))
            if len(rows) == num:
                break
    else:
        raise UserError(
            f"--num {num}: {task} gave only {len(rows)} new distinct prompts in {limit} draws; ask for fewer"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(row + "\n" for row in rows), encoding="utf-8")
    print(f"wrote {output}: {num} prompts of {task}")


def _prompts_of(path: Path) -> set[str]:
    prompts, problems = set(), Problems(path)
    for place, _, row in open_prompt_file(path, ["input"]).scan():
        if isinstance(row, BadRow) or not isinstance(row.get("input"), str):
            problems.add(place, row if isinstance(row, BadRow) else "no input")
        else:
            prompts.add(row["input"])
    problems.check()
    return prompts


if __name__ == "__main__":
    run(make_prompts, __doc__)
