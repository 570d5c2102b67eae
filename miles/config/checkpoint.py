"""What is loaded, saved and exported."""

from typing import ClassVar

from pydantic import Field

from miles.config.paths import LoadFolder, OutputFolder
from miles.config.section import Section


class CheckpointConfig(Section):
    title: ClassVar[str] = "Checkpoints"

    load: LoadFolder | None = Field(
        None, description="Folder of checkpoints to resume from. Unset, or without a checkpoint in it: a new run."
    )
    ckpt_step: int | None = Field(
        None, ge=0, description="The checkpoint of --load to take. Unset: the newest whole one."
    )
    no_load_optim: bool = Field(False, description="Load the weights only, not the optimizer and its schedule.")
    save: OutputFolder | None = Field(None, description="Folder that checkpoints are written to.")
    save_interval: int | None = Field(None, gt=0, description="Rollouts between checkpoints. Needs --save.")
    no_save_optim: bool = Field(False, description="Leave the optimizer out of checkpoints: smaller, not resumable.")
    save_hf: OutputFolder | None = Field(
        None,
        description="Folder of Hugging Face exports. {rollout_id} in it keeps every one; without, the newest replaces "
        "the last.",
    )
