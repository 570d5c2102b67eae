"""New weights on their way from the trainer to the engines."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from miles.config.effect import OnlyWith, engines_run
from miles.config.paths import OutputFolder
from miles.config.section import Section, rule
from miles.config.values import Values
from miles.hf.families import shape_of
from miles.hf.shape import model_shape
from miles.weight_sync.transports import REMOTE_TRANSPORTS

if TYPE_CHECKING:
    TransferMode = str
else:
    TransferMode = Literal[tuple(REMOTE_TRANSPORTS)]


class WeightSyncConfig(Section):
    title: ClassVar[str] = "Weight sync"

    update_weight_buffer_size: int = Field(
        512 * 1024**2,
        gt=0,
        description="Bytes of one bucket of the weight sync; a trainer rank holds two. Fewer and larger buckets are "
        "faster.",
    )
    update_weight_transfer_mode: Annotated[
        TransferMode,
        OnlyWith(
            "engines on GPUs of their own",
            "since those that share the trainer's read its memory",
            when=lambda v: v.num_colocated_engines < v.num_engines,
            where=engines_run,
            warns=True,
        ),
    ] = Field(
        "broadcast",
        description="How weights reach engines that are not on the trainer's GPUs. "
        + " ".join(f"{name}: {transport.help}." for name, transport in REMOTE_TRANSPORTS.items())
        + " Colocated engines always read the trainer's memory.",
    )
    update_weight_disk_dir: Annotated[OutputFolder | None, OnlyWith("--update-weight-transfer-mode disk")] = Field(
        None,
        description="Folder that trainer and engines both see, for --update-weight-transfer-mode disk. Each sync "
        "writes a checkpoint there and removes it.",
    )
    pause_generation_mode: Literal["abort", "retract", "in_place"] = Field(
        "abort",
        description="What a sync does to requests that still run. abort: end them. retract: queue them again, their "
        "tokens are kept and computed anew. in_place: freeze them, they go on with what the old weights computed. With "
        "the last two, an engine with requests keeps cached prefixes of the old weights.",
    )
    check_weight_update_equal: bool = Field(
        False,
        description="After the first sync, overwrite the engines' weights with random numbers, send them again, and "
        "stop where a tensor of an engine is not what it was or not what was sent.",
    )
    rollout_fp8: bool = Field(
        False,
        description="Engines compute projections in FP8: each sync quantises the trainer's weights in blocks of 128 x "
        "128. An engine starts without weights, which the first sync brings.",
    )


@rule
def _disk_folder(v: Values) -> Iterator[str]:
    if v.update_weight_transfer_mode == "disk" and v.update_weight_disk_dir is None:
        yield "--update-weight-transfer-mode disk needs --update-weight-disk-dir, a folder that trainer and engines see"


@rule
def _fp8_engines(v: Values) -> Iterator[str]:
    if not v.rollout_fp8:
        return
    if v.rollout_external:
        yield "--rollout-fp8 is for engines that Miles starts; drop it, or --rollout-external-engine-addrs"
    elif not v.needs_trainer:
        yield (
            "--rollout-fp8 has no effect without a trainer that sends weights; give a checkpoint in FP8 "
            "(python -m miles.tools.convert --to fp8 makes one), or drop it"
        )
    elif v.device == "cpu" and (fields := model_shape(v.hf_checkpoint)) and shape_of(fields).num_experts:
        yield "--rollout-fp8 with experts needs --device cuda: SGLang has no FP8 experts on a CPU; drop it"
