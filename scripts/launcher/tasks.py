"""What a recipe trains on: files, and the flags that go with them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from launcher.recipe import Flags


@dataclass(frozen=True)
class DataFile:
    """One file of prompts, FOLDER/PATH in --data-dir.

    Args:
        folder: of the data set.
        path: of the file in it.
        repository: data set on huggingface.co that has the file; None where `make` writes it.
        make: words of a command that writes the file that it is given.
    """

    folder: str
    path: str
    repository: str | None = None
    make: Callable[[str], list[str]] | None = None


@dataclass(frozen=True)
class Task:
    """A file to train on and perhaps one to evaluate with, with how they are read and scored.

    Args:
        train: its file.
        flags: how rows are read and scored.
        evaluation: the name of the metric behind eval/, and its file.
        eval_flags: how the evaluation's rows are read and answered.
    """

    train: DataFile
    flags: Flags
    evaluation: tuple[str, DataFile] | None = None
    eval_flags: Flags = field(default_factory=dict)

    @property
    def files(self) -> tuple[DataFile, ...]:
        """All files."""
        return (self.train, self.evaluation[1]) if self.evaluation else (self.train,)


def _make_sums(path: str) -> list[str]:
    return ["-m", "miles.tools.make_prompts", "--task", "addition", "--num", "500", "--output", path]


_CHAT: Flags = {"label_key": "label", "apply_chat_template": True}

TASKS = {
    "dapo_aime": Task(
        train=DataFile("dapo-math-17k", "dapo-math-17k.jsonl", "zhuzilin/dapo-math-17k"),
        flags={"input_key": "prompt", **_CHAT, "rm_type": "deepscaler", "rollout_max_response_len": 8192},
        evaluation=("aime", DataFile("aime-2024", "aime-2024.jsonl", "zhuzilin/aime-2024")),
        eval_flags={"n_samples_per_eval_prompt": 16, "eval_max_response_len": 16384, "eval_top_p": 0.7},
    ),
    "gsm8k": Task(
        train=DataFile("gsm8k", "train.parquet", "zhuzilin/gsm8k"),
        flags={"input_key": "messages", **_CHAT, "rm_type": "math", "rollout_max_response_len": 1024},
        evaluation=("gsm8k", DataFile("gsm8k", "test.parquet", "zhuzilin/gsm8k")),
    ),
    "addition": Task(
        train=DataFile("addition", "train.jsonl", make=_make_sums),
        flags={**_CHAT, "rm_type": "math", "rollout_max_response_len": 16},
    ),
}
