"""Offload: whether a side leaves the GPU while the other one computes."""

from typing import ClassVar

from pydantic import Field

from miles.config.section import Section


class OffloadConfig(Section):
    title: ClassVar[str] = "Offload"

    offload: bool = Field(False, description="Short for --offload-train --offload-rollout.")
    offload_train: bool | None = Field(
        None, description="The trainer's memory leaves the GPU while engines generate. Unset: on with --colocate."
    )
    offload_rollout: bool | None = Field(
        None, description="The engines' memory leaves the GPU while the trainer computes. Unset: on with --colocate."
    )
