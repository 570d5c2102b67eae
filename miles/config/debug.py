"""Looking into a run, and running one half of it."""

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from miles.config.paths import InputTemplate, OutputFile
from miles.config.section import Derived, Section, derives
from miles.config.values import Values


class DebugConfig(Section):
    title: ClassVar[str] = "Debugging"

    save_debug_rollout_data: OutputFile | None = Field(
        None,
        description="File that each rollout's samples are written to, such as runs/a/rollout_{rollout_id}.jsonl, for "
        "python -m miles.tools.show_samples. Evaluations go beside it.",
    )
    load_debug_rollout_data: InputTemplate | None = Field(
        None,
        description="Train on the files that --save-debug-rollout-data wrote instead of generating; no engine starts.",
    )


@derives("save_debug_rollout_data")
def _not_with_loaded_samples(v: Values) -> Iterator[Derived]:
    if v.load_debug_rollout_data is not None and v.save_debug_rollout_data is not None:
        yield "save_debug_rollout_data", None, "--load-debug-rollout-data: no engine runs"
