"""Log-probabilities of the response tokens: what the loss needs of the model's output, and no more.

Shapes: T tokens of a micro-batch (T / tp under sequence parallelism), N response tokens, H hidden size.
"""

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region

from miles.backends.trainer.protocol import Scoring
from miles.training.packing import PackedBatch
from miles.training.vocab_parallel import log_probs_and_entropy


@dataclass(frozen=True)
class ScoringContext:
    """What `score_responses` is told about one micro-batch."""

    packed: PackedBatch
    scoring: Scoring
    softcap: float | None


def score_responses(
    *, hidden_states, output_layer, output_weight: torch.Tensor | None, context: ScoringContext, **_
) -> tuple[torch.Tensor, torch.Tensor]:
    """GPTModel's `output_processor`: log-probability and entropy [N] of each response token, float32.

    Prompt and padding rows, and logits of more tokens than a chunk, would be the largest tensors of a step.
    """
    # Megatron's overlapped gather of parameters waits for a layer's in the hooks of its call, which does not happen.
    for hook in output_layer._forward_pre_hooks.values():
        hook(output_layer, ())
    packed, scoring = context.packed, context.scoring
    if output_layer.sequence_parallel:
        hidden_states = gather_from_sequence_parallel_region(hidden_states, group=output_layer.tp_group)
        hidden_NH = hidden_states[:, 0].index_select(0, packed.logit_index_N)
    else:
        hidden_NH = hidden_states[:, 0].index_select(0, packed.logit_index_N)
        hidden_NH = copy_to_tensor_model_parallel_region(hidden_NH, group=output_layer.tp_group)
    return log_probs_and_entropy(
        hidden_NH,
        output_layer.weight if output_weight is None else output_weight,
        packed.target_N,
        scoring.temperature,
        group=output_layer.tp_group,
        entropy_grad=scoring.entropy_grad,
        vocab_size=scoring.vocab_size,
        softcap=context.softcap,
        chunk_size=scoring.chunk_size,
    )
