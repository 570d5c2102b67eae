"""What is loaded, saved and exported."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from miles.config.effect import OnlyWith
from miles.config.paths import LoadFolder, OutputFolder
from miles.config.section import Derived, Section, derives, rule
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
    no_load_rng: Annotated[bool, OnlyWith("--load")] = Field(
        False, description="Do not load the trainer's random state: it starts from --seed."
    )
    finetune: Annotated[bool, OnlyWith("--load")] = Field(
        False,
        description="Begin a new run with the weights of the checkpoint: rollout 0, the first prompts, a new optimizer "
        "and random state.",
    )
    save: OutputFolder | None = Field(None, description="Folder that checkpoints are written to.")
    save_interval: Annotated[int | None, OnlyWith("--save", "the folder of the checkpoints")] = Field(
        None, gt=0, description="Rollouts between checkpoints. Needs --save."
    )
    save_retain_interval: Annotated[int | None, OnlyWith("--save-interval")] = Field(
        None,
        gt=0,
        description="Rollouts between checkpoints that are kept, a multiple of --save-interval: of the others that "
        "this run loads or saves only the newest stays. Unset: all are kept.",
    )
    no_save_optim: bool = Field(False, description="Leave the optimizer out of checkpoints: smaller, not resumable.")
    save_hf: OutputFolder | None = Field(
        None,
        description="Folder of Hugging Face exports. {rollout_id} in it keeps every one; without, the newest replaces "
        "the last.",
    )


@derives("no_load_optim", "no_load_rng", "start_rollout_id")
def _weights_only(v: Values) -> Iterator[Derived]:
    if v.load is None or not v.finetune:
        return
    reason = "--finetune: a new run with these weights"
    for name in ("no_load_optim", "no_load_rng"):
        if not getattr(v, name):
            yield name, True, reason
    if v.start_rollout_id is None:
        yield "start_rollout_id", 0, reason


@rule
def _retained(v: Values) -> Iterator[str]:
    kept, saved = v.save_retain_interval, v.save_interval
    if kept is not None and saved is not None and kept % saved:
        yield (
            f"--save-retain-interval {kept} is no multiple of --save-interval {saved}: hardly a checkpoint would be "
            f"one of those to keep; give {-(kept // -saved) * saved}"
        )


@rule
def _exports(v: Values) -> Iterator[str]:
    if v.save_hf is None:
        return
    if set("{}") & set(v.save_hf.replace("{rollout_id}", "")):
        yield f"--save-hf {v.save_hf}: the only thing in braces may be {{rollout_id}}"
    elif problem := export_problem(v.save_hf):
        yield f"--save-hf {problem}"
