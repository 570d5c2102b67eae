"""What is loaded, saved and exported."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from miles.config.effect import OnlyWith
from miles.config.paths import LoadFolder, OutputFolder
from miles.config.section import Section, rule
from miles.config.values import Values
from miles.utils.export_folder import export_problem


class CheckpointConfig(Section):
    title: ClassVar[str] = "Checkpoints"

    load: LoadFolder | None = Field(
        None, description="Folder of checkpoints to resume from. Unset, or without a checkpoint in it: a new run."
    )
    ckpt_step: Annotated[int | None, OnlyWith("--load", "the folder of the checkpoints")] = Field(
        None, ge=0, description="The checkpoint of --load to take. Unset: the newest whole one."
    )
    no_load_optim: Annotated[bool, OnlyWith("--load")] = Field(
        False, description="Load the weights only, not the optimizer and its schedule."
    )
    save: OutputFolder | None = Field(None, description="Folder that checkpoints are written to.")
    save_interval: Annotated[int | None, OnlyWith("--save", "the folder of the checkpoints")] = Field(
        None, gt=0, description="Rollouts between checkpoints. Needs --save."
    )
    no_save_optim: bool = Field(False, description="Leave the optimizer out of checkpoints: smaller, not resumable.")
    save_hf: OutputFolder | None = Field(
        None,
        description="Folder of Hugging Face exports. {rollout_id} in it keeps every one; without, the newest replaces "
        "the last.",
    )


@rule
def _exports(v: Values) -> Iterator[str]:
    if v.save_hf is None:
        return
    if set("{}") & set(v.save_hf.replace("{rollout_id}", "")):
        yield f"--save-hf {v.save_hf}: the only thing in braces may be {{rollout_id}}"
    elif problem := export_problem(v.save_hf):
        yield f"--save-hf {problem}"
