"""How many parameters each rank of the trainer, and each GPU of an engine, holds: from the families' entries.

An entry names a parameter and the shapes of the checkpoint's tensors in it, so that nothing is built and no weight is
read. Megatron is asked where pipeline stages are cut.
"""

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from miles.check.activations import LayerTraits
from miles.config import RunConfig
from miles.hf.entries import Entry
from miles.hf.families import ModelShape, shape_of
from miles.hf.families.traits import TRAITS
from miles.hf.flops import ForwardFlops, forward_flops
from miles.hf.parallel import ParallelSizes


@dataclass(frozen=True)
class Stage:
    """One rank of a pipeline stage.

    Args:
        chunks: the global layers of each chunk of its model.
        dense: its parameters outside experts, in this rank's part. experts: those of its experts.
        largest: of one parameter.
        last: it has the output layer.
    """

    chunks: tuple[tuple[int, ...], ...]
    dense: int
    experts: int
    largest: int
    last: bool

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.dense + self.experts


@dataclass(frozen=True)
class Model:
    """A model as the ledger needs it.

    Args:
        name: its architecture.
        parameters: of the whole model.
        largest: of the largest tensor of the checkpoint.
        engine_part: from an engine's tensor- and attention-parallel sizes to the parameters on one of its GPUs.
        active: weights that a token meets in a forward pass, the output layer's among them.
    """

    name: str
    shape: ModelShape
    traits: LayerTraits
    stages: tuple[Stage, ...]
    parameters: int
    largest: int
    engine_part: Callable[[int, int], float]
    flops: ForwardFlops
    active: float


def read_model(config: RunConfig) -> Model:
    """The model of --hf-checkpoint under the run's parallel sizes.

    Raises:
        UserError: its family is unknown, or cannot have these sizes.
    """
    # Takes seconds, for Megatron comes with it: here, and not when a command line is read.
    from miles.backends.megatron_utils.families import family_for
    from miles.backends.megatron_utils.model import chunk_layers, transformer_config
    from miles.hf.config import load_hf_config

    hf_config = load_hf_config(config.hf_checkpoint)
    family, sizes = family_for(hf_config), config.parallel_sizes
    family.check_layout(hf_config, sizes)
    shape, architecture = shape_of(hf_config.to_dict()), TRAITS[hf_config.architectures[0]]
    with warnings.catch_warnings():
        # Of Megatron's own defaults.
        warnings.filterwarnings("ignore", "full scope is deprecated")
        megatron = transformer_config(config, hf_config)
    layout = chunk_layers(megatron)
    layers = range(hf_config.num_hidden_layers)
    whole = family.entries(hf_config, layers, True, True)

    def stage_of(number: int) -> Stage:
        chunks = layout[number]
        entries = [
            entry
            for index, chunk in enumerate(chunks)
            for entry in family.entries(
                hf_config,
                chunk,
                number == 0 and index == 0,
                number == sizes.pp - 1 and index == len(chunks) - 1,
                sizes.ep,
            )
        ]
        return _stage(entries, chunks, sizes, last=number == sizes.pp - 1)

    flops = forward_flops(shape)
    return Model(
        name=hf_config.architectures[0],
        shape=shape,
        traits=LayerTraits(
            qk_norm=any(entry.megatron_name.endswith("q_layernorm.weight") for entry in whole),
            wide_norms=architecture.plus_one_norm,
            post_norms=architecture.post_norms,
            sinks=architecture.sinks,
            fused_activation=bool(megatron.bias_activation_fusion),
            itemsize=2 if config.bf16 else 4,
        ),
        stages=tuple(map(stage_of, range(sizes.pp))),
        parameters=sum(_elements(entry) for entry in whole),
        largest=max(math.prod(size) for entry in whole for size in entry.shapes),
        engine_part=_engine_part(whole),
        flops=flops,
        active=(flops.per_token + flops.per_response_token) / 2,
    )


def _elements(entry: Entry) -> int:
    return sum(map(math.prod, entry.shapes))


def _stage(entries: Iterable[Entry], chunks: list[range], sizes: ParallelSizes, last: bool) -> Stage:
    dense = experts = largest = 0
    for entry in entries:
        if entry.ep_rank not in (None, 0):
            continue
        part = _elements(entry)
        if entry.is_expert:
            part //= (sizes.etp if entry.kind.sharded else 1) * (sizes.ep if entry.stacked else 1)
            experts += part
        else:
            # Rows of the vocabulary are rounded up.
            part = -(-part // sizes.tp) if entry.kind.sharded else part
            dense += part
        largest = max(largest, part)
    return Stage(tuple(tuple(chunk) for chunk in chunks), dense, experts, largest, last)


def _engine_part(entries: list[Entry]) -> Callable[[int, int], float]:
    """Attention is cut among fewer ranks than the rest where an engine has several replicas of it."""
    attention, other, whole = 0, 0, 0
    for entry in entries:
        if not (entry.kind.sharded or entry.is_expert):
            whole += _elements(entry)
        elif ".self_attention." in entry.megatron_name:
            attention += _elements(entry)
        else:
            other += _elements(entry)
    return lambda tensor, attention_ranks: whole + attention / attention_ranks + other / tensor


def expert_data_ranks(config: Any) -> int:
    """Ranks that have the same experts, and share out the state of their optimizer."""
    sizes = config.parallel_sizes
    return config.world_size // (sizes.pp * sizes.ep * sizes.etp)
