"""Looking into a run, and running one half of it."""

from typing import ClassVar

from pydantic import Field

from miles.config.paths import InputTemplate, OutputFile
from miles.config.section import Section


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
