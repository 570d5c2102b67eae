"""What a trainer asks of the library that holds its model: `TrainedModel`, one rank's part of it.

Megatron's is `miles.backends.megatron_utils.trained_model`. A backend brings this class, the actors made of it, and a
`Launch`; the passes over a shard, the optimizer steps, checkpoints and the actors' verbs are the same for all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from miles.config import RunConfig
from miles.residency.memory import DeviceMemory
from miles.residency.plan import Region
from miles.training.packing import PackedBatch
from miles.training.vocab_parallel import CHUNK_SIZE
from miles.utils.agreement import Agreement
from miles.weight_sync.source import Read, WeightSource

Group = Callable[[], dist.ProcessGroup]
# From the scores [N] of a micro-batch's response tokens, and the micro-batch as the last argument, to its loss and what
# to collect of it. An actor's scores are log-probability and entropy, a critic's the value.
ScoreFunction = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]
# The tags that a device memory knows a trainer's regions by.
TAGS = {Region.WEIGHTS: "param_buffer", Region.GRADS: "grad_buffer", Region.OPTIMIZER: "optimizer"}


@dataclass(frozen=True)
class Scoring:
    """How response tokens are scored.

    Args:
        vocab_size: size of the vocabulary without padding.
        temperature: what logits are divided by.
        entropy_grad: let gradients flow through the entropy.
        chunk_size: tokens whose logits exist at a time.
    """

    vocab_size: int
    temperature: float = 1.0
    entropy_grad: bool = False
    chunk_size: int = CHUNK_SIZE

    @classmethod
    def of(cls, config: RunConfig, vocab_size: int) -> "Scoring":
        """As the run's configuration has it."""
        # Supervised samples were not drawn at a temperature.
        temperature = 1.0 if config.loss_type == "sft_loss" else config.rollout_temperature
        return cls(vocab_size, temperature, config.entropy_coef != 0, config.log_probs_chunk_size)


@dataclass(frozen=True)
class ProcessGrid:
    """A rank's place among the trainer's ranks.

    The groups are asked for at each use: a trainer may destroy its groups to sleep, and has new ones afterwards.

    Args:
        dp_rank: which data-parallel shard the rank trains on.
        cp_rank, cp_size: which part of each sequence of it, of how many.
        is_last_stage: whether scores and losses are made here: on the last pipeline stage.
        reports: whether this rank's metrics are the trainer's. One rank's are; it is of the last stage.
        dp_group: the ranks that share the rollout out, and have its tokens once together with one `cp_rank`.
        dp_cp_group: those of `dp_group` and their context-parallel peers: together they have the rollout's tokens once.
        cp_group: the ranks that share the sequences of this one's shard.
        pp_group: the pipeline stages of one model.
    """

    dp_rank: int
    cp_rank: int
    cp_size: int
    is_last_stage: bool
    reports: bool
    dp_group: Group
    dp_cp_group: Group
    cp_group: Group
    pp_group: Group


class Groups(Protocol):
    """The process groups that a sleeping trainer does without. All ranks call a verb together."""

    agreement: Agreement

    @property
    def alive(self) -> bool:
        """Whether they exist and can be used."""
        ...

    def destroy(self) -> None:
        """Destroy them, once all ranks are here; finishes what an earlier failure left."""
        ...

    def rebuild(self) -> None:
        """Build them anew, in the place of the old ones."""
        ...

    def verify(self) -> None:
        """Raise RuntimeError where something still holds one that was destroyed."""
        ...


class Masters(Protocol):
    """Weights of the model from the optimizer's more precise ones. Ranks that share them call it together."""

    def read(self, parameter: torch.Tensor, expert: int | None = None) -> torch.Tensor:
        """The values of a parameter, or of one expert's part of it; its own memory is not touched."""
        ...

    def rebuild(self) -> None:
        """Fill all parameters, which are in memory."""
        ...


class TrainedModel(Protocol):
    """One rank's part of a model, its optimizer and its schedule (optimizer steps as units).

    It is built without weights. `load_hf` fills it, `build_optimizer` follows once the weights are in, then perhaps
    `load_state`, and `begin` at last. Methods are called on all ranks together unless they say otherwise.

    Attributes:
        grid: this rank's place.
        pad_multiple: to what multiple of tokens (times cp_size) a micro-batch is padded.
        config: the run's configuration.
    """

    config: RunConfig
    grid: ProcessGrid
    pad_multiple: int

    @property
    def groups(self) -> Groups:
        """What a sleep may destroy, from `begin` on."""
        ...

    # Weights

    def weights(self) -> list[torch.Tensor]:
        """What a checkpoint has of this rank's model, parameters and buffers, each once, always in one order. Local."""
        ...

    def load_hf(self, folder: str) -> None:
        """Fill the model from a Hugging Face checkpoint; a critic's value head is new.

        Raises:
            ValueError: names or shapes differ.
        """
        ...

    def check_same_computation(self, flag: str, folder: str) -> None:
        """Raise ValueError naming what differs, unless the model in `folder` (of `flag`) computes as this one does."""
        ...

    def weight_source(self, read: Read, copies: bool) -> WeightSource:
        """The weights as a sync and an export take them, in the checkpoint's names.

        Args:
            read: gives the values of a parameter, or of a buffer.
            copies: it may give copies; False promises that it gives their own memory.

        Raises:
            ValueError: the model and the checkpoint in --hf-checkpoint differ.
        """
        ...

    # Training

    def build_optimizer(self, config: RunConfig, total_steps: int) -> None:
        """Build optimizer and schedule for `total_steps` steps; `config` may have a checkpoint's settings of them."""
        ...

    def begin(self, agreement: Agreement) -> None:
        """Everything is loaded: do what is left before the first pass. agreement: of all ranks."""
        ...

    def run(
        self, micro_batches: Sequence[PackedBatch], function: ScoreFunction, forward_only: bool
    ) -> list[dict[str, torch.Tensor]]:
        """Pass over `micro_batches`; unless `forward_only`, add the gradients of the losses to what there is.

        While a micro-batch is in the model, also where it is computed once more for the backward pass,
        `side_input.micro_batch()` gives it to the layers.

        Returns:
            What `function` collected of each, on the last pipeline stage; elsewhere an empty list.
        """
        ...

    def begin_step(self, micro_batches: Sequence[PackedBatch]) -> None:
        """Zero the gradients ahead of a step's `run`."""
        ...

    def end_passes(self) -> dict[str, float]:
        """A step's passes are done. Returns metrics of the model beside the loss's, on the ranks that report."""
        ...

    def gradient_norm(self) -> float:
        """The norm of the whole model's gradient, once summed over all ranks; the same on all of them."""
        ...

    def apply_gradients(self, norm: float) -> None:
        """Clip by `norm`, which is `gradient_norm()` and finite, update the weights, and advance the schedule."""
        ...

    def end_steps(self) -> None:
        """The rollout's steps are done: weights may be read as they are in memory from now on."""
        ...

    @property
    def learning_rate(self) -> float:
        """Of the next step. Local."""
        ...

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken, those of earlier runs included. Local."""
        ...

    def reset_optimizer(self) -> None:
        """Zero moments and their step counters: the next step is that of a new optimizer. Local."""
        ...

    # Checkpoints

    def save_state(self, folder: Path, with_optimizer: bool) -> None:
        """Write this rank's part of weights, optimizer and schedule below `folder / MODEL`, which exists."""
        ...

    def load_state(self, folder: Path, with_optimizer: bool) -> None:
        """Read what `save_state` wrote. Of optimizer and schedule: moments and counts of steps, not their settings.

        Raises:
            ValueError: there is no such state, or of an optimizer of another kind.
        """
        ...

    def save_weights(self, folder: Path) -> None:
        """Write the weights as they are now, without anything else, to `folder`, which exists."""
        ...

    def load_weights(self, folder: Path) -> None:
        """Read what `save_weights` wrote. The optimizer is not touched."""
        ...

    def saved_settings(self, folder: Path) -> dict[str, Any] | None:
        """The optimizer's settings in the checkpoint at `folder`; None where it has no optimizer's state. Local."""
        ...

    def is_of_critic(self, folder: Path) -> bool:
        """Whether the checkpoint at `folder` is a critic's. Local."""
        ...

    # Memory: where it is, and its moves, are `TrainerResidency`'s.

    def build_regions(self, memory: DeviceMemory) -> dict[Region, list[torch.Tensor]]:
        """Move weights, gradients and the optimizer's state into regions of `memory`, under `TAGS`.

        Tensors keep their identity. The optimizer's state exists from here on, zeros before the first step. Gradients
        are zero.

        Returns:
            For each region of `TAGS` its memory, flat uint8 tensors: what a move copies.
        """
        ...

    def lasting_tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that must survive a sleep, by a name for messages. Local."""
        ...

    def master_weights(self, contents: Callable[[torch.Tensor], torch.Tensor]) -> Masters:
        """The weights as the optimizer has them; ValueError where it has no others than the model's.

        Args:
            contents: from a master to its current values, wherever they are: not to be written to.
        """
        ...

    def drop_workspaces(self) -> None:
        """Drop what the model keeps in memory and makes again when it is needed. Local."""
        ...
