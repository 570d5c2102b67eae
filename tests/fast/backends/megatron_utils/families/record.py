"""What a family's tests are made of: a file in data/ makes one `FAMILY`, and test_parity.py runs it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedConfig, PreTrainedModel

from miles.hf.parallel import ParallelSizes

SIZES = dict(
    vocab_size=251,  # padded under tensor parallelism
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
)


@dataclass(frozen=True)
class FamilyTests:
    """Tiny models of one family, and what must hold of them.

    Attributes:
        cases: {name: configuration}: of each a random checkpoint is made, as the hub has it.
        layouts: names in `parity.LAYOUTS` in which every case must agree with transformers.
        slow_layouts: further ones, for `make test-slow`.
        only: {layout: names of cases}: the layout has these alone.
        controls: {what is wrong: (case, changed fields of config.json)}: our model is built with them, loads the same
            checkpoint, and must miss by more than `least`.
        switches: {what is wrong: (case, layout, patch)}: the same for what no field switches off; the model is built
            and run within `patch()`.
        refused: (configuration, what the error names): what a family does not support.
        layouts_accepted: (configuration, parallel sizes).
        layouts_refused: (configuration, parallel sizes, what the error names).
        finish: makes further cases of the folders of `cases`.
        fill: fills what random numbers would not do for.
        save: writes a model, or its gradients in its place, as the hub has it.
        std: standard deviation of the weights.
        log_prob_bound: largest difference of a log-probability, in nats.
        gradient_bound: largest difference of a gradient, relative to the weight's largest.
        gradient_floor: share of the model's largest gradient that a weight's largest is taken to be at least: for
            weights whose gradients all but cancel, where transformers is as far from float64.
        least: in nats; above it a control is seen.
    """

    cases: dict[str, PreTrainedConfig]
    layouts: tuple[str, ...] = ("one", "tp2_sp")
    slow_layouts: tuple[str, ...] = ()
    only: dict[str, list[str]] = field(default_factory=dict)
    controls: dict[str, tuple[str, dict]] = field(default_factory=dict)
    switches: dict[str, tuple[str, str, Callable[[], AbstractContextManager]]] = field(default_factory=dict)
    refused: Sequence[tuple[PreTrainedConfig, str]] = ()
    layouts_accepted: Sequence[tuple[PreTrainedConfig, ParallelSizes]] = ()
    layouts_refused: Sequence[tuple[PreTrainedConfig, ParallelSizes, str]] = ()
    finish: Callable[[Path], None] | None = None
    fill: Callable[[PreTrainedModel], None] | None = None
    save: Callable[[PreTrainedModel, Path], None] = PreTrainedModel.save_pretrained
    std: float = 0.15
    log_prob_bound: float = 2e-5
    gradient_bound: float = 1e-4
    gradient_floor: float = 0.0
    least: float = 1e-3


def changed(config: PreTrainedConfig, **changes) -> PreTrainedConfig:
    """The configuration with other values, which its class may not accept."""
    for name, value in changes.items():
        setattr(config, name, value)
    return config
