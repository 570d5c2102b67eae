"""What a run leaves behind, and the seed."""

from typing import ClassVar

from pydantic import Field

from miles.config.paths import OutputFolder
from miles.config.section import Section


class TrackingConfig(Section):
    title: ClassVar[str] = "Tracking and seed"

    run_dir: OutputFolder | None = Field(
        None,
        description="Folder of metrics.jsonl, TensorBoard files and logs. Unset: runs/, the time of the start and a "
        "number of its own.",
    )
    use_tensorboard: bool = Field(True, description="Write TensorBoard files.")
    seed: int = Field(1234, ge=0, description="Seed of the trainer and the engines.")
