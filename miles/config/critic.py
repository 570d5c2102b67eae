"""The critic of --advantage-estimator ppo."""

from typing import ClassVar

from pydantic import Field

from miles.config.paths import LoadFolder, OutputFolder
from miles.config.section import Section


class CriticConfig(Section):
    title: ClassVar[str] = "Critic"

    num_critic_only_steps: int = Field(
        0, ge=0, description="Rollouts at the start of a run that train the critic alone."
    )
    critic_load: LoadFolder | None = Field(
        None,
        description="Folder of the critic's checkpoints to resume from. Unset: with --load, that and _critic. A new "
        "critic starts from --hf-checkpoint with values of zero.",
    )
    critic_save: OutputFolder | None = Field(
        None, description="Folder that the critic's checkpoints are written to. Unset: with --save, that and _critic."
    )
    critic_lr: float | None = Field(None, ge=0, description="The critic's learning rate. Unset: --lr.")
    critic_lr_warmup_iters: int = Field(0, ge=0, description="Optimizer steps of the critic's own linear warm-up.")
    value_clip: float = Field(
        0.2, gt=0, description="A value's loss is clipped where it moves by more than this from that before the step."
    )
