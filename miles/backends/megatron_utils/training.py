"""Passes of one rank's Megatron model over micro-batches, in Megatron's pipeline schedule."""

from collections.abc import Callable, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

from miles.backends.megatron_utils.logits import ScoringContext, score_responses
from miles.backends.megatron_utils.parts.packed import packed_sequences
from miles.backends.trainer import side_input
from miles.backends.trainer.protocol import ScoreFunction, Scoring
from miles.training.packing import PackedBatch

# GPTModel's `output_processor`: a tuple of scores [N] of a micro-batch's response tokens.
Score = Callable[..., tuple[torch.Tensor, ...]]


def run_micro_batches(
    chunks: list[torch.nn.Module],
    micro_batches: Sequence[PackedBatch],
    scoring: Scoring,
    function: ScoreFunction,
    forward_only: bool,
    score: Score = score_responses,
) -> list[dict[str, torch.Tensor]]:
    """One pass of Megatron's pipeline schedule over `micro_batches`; with gradients unless `forward_only`.

    Args:
        chunks: the model's parts on this pipeline stage.
        micro_batches: all of a step, or of a pass.
        scoring: how response tokens are scored.
        function: from the scores of a micro-batch to its loss and what to collect.
        forward_only: compute no gradients.
        score: what is computed of each response token, from a ScoringContext.

    Returns:
        What `function` collected of each micro-batch, on the last pipeline stage; elsewhere an empty list.
    """

    def forward_step(iterator, model):
        packed = next(iterator)
        bare = unwrap_model(model)
        boundaries = packed_sequences(
            packed.cu_seqlens,
            packed.position_ids_T,
            packed.max_seqlen,
            bare.ropes,
            parallel_state.get_context_parallel_group(),
        )
        with side_input.running(packed):
            output = model(
                packed.tokens_T[None],
                packed.position_ids_T[None],
                None,
                packed_seq_params=boundaries,
                output_processor=score,
                output_processor_context=ScoringContext(packed, scoring, bare.logit_softcap),
            )

        def finish(scores: tuple[torch.Tensor, ...]):
            loss, collected = function(*scores, packed)
            # The second value would divide the loss; it is divided already.
            return loss, torch.ones((), dtype=torch.int, device=loss.device), collected

        return output, finish

    _group_micro_batches(unwrap_model(chunks[0]).config, len(micro_batches))
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micro_batches) for _ in chunks],
        model=chunks,
        num_microbatches=len(micro_batches),
        seq_length=len(micro_batches[0].tokens_T),
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _group_micro_batches(megatron_config: TransformerConfig, count: int) -> None:
    """Choose how many micro-batches an interleaved stage takes through one chunk before it turns to the next.

    Megatron takes the number of stages, and refuses a last group of fewer; all at once is always legal.
    """
    stages = megatron_config.pipeline_model_parallel_size
    megatron_config.microbatch_group_size_per_vp_stage = count if count % stages else stages
