"""Forward and training passes of one rank over its shard of a rollout.

Every loss and metric is a sum with weights that add up to one over the whole step (see miles/training/schedule.py), so
micro-batches, data-parallel and context-parallel ranks and their gradients are only ever added.
"""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

from miles.backends.megatron_utils import step_metrics
from miles.backends.megatron_utils.logits import Scoring, ScoringContext, score_responses
from miles.backends.megatron_utils.model import TrainState
from miles.backends.megatron_utils.optimizer_steps import GuardedSteps
from miles.backends.megatron_utils.parts.context_parallel import combined
from miles.backends.megatron_utils.parts.packed import packed_sequences
from miles.config import RunConfig
from miles.training.packing import PackedBatch, pack
from miles.training.policy import make_loss
from miles.training.sample_sums import sum_over
from miles.training.schedule import StepShard, TrainShard

# GPTModel's `output_processor`: a tuple of scores [N] of a micro-batch's response tokens.
Score = Callable[..., tuple[torch.Tensor, ...]]
# From those scores, and the micro-batch as the last argument, to (loss, what to collect).
ScoreFunction = Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]


def run_micro_batches(
    chunks: list[torch.nn.Module],
    micro_batches: Sequence[PackedBatch],
    scoring: Scoring,
    function: ScoreFunction,
    forward_only: bool,
    score: Score = score_responses,
) -> list[dict[str, torch.Tensor]]:
    """One pass of Megatron's pipeline schedule over `micro_batches`; with gradients unless `forward_only`.

    chunks: the model's parts on this pipeline stage. score: what is computed of each response token, from a
    ScoringContext.

    Returns what `function` collected for each micro-batch, on the last pipeline stage; elsewhere an empty list.
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


class ShardTrainer:
    """Runs the passes that a rollout needs on one rank's model.

    Args:
        config: the run's configuration.
        vocab_size: size of the vocabulary without padding.
    """

    # What is computed of each response token.
    score: Score = staticmethod(score_responses)

    def __init__(self, config: RunConfig, vocab_size: int):
        self.config = config
        # Supervised samples were not drawn at a temperature.
        temperature = 1.0 if config.loss_type == "sft_loss" else config.rollout_temperature
        self.scoring = Scoring(vocab_size, temperature, config.entropy_coef != 0, config.log_probs_chunk_size)
        self.pad_multiple = config.data_pad_size_multiplier * config.tensor_model_parallel_size
        self.optimizer_step = GuardedSteps(config.max_nonfinite_steps)
        self._loss = self._make_loss()

    def log_probs(self, chunks: list[torch.nn.Module], shard: TrainShard) -> torch.Tensor | None:
        """Log-probability of each response token of the shard under the weights in `chunks`: the first of `scores`."""
        scores = self.scores(chunks, shard)
        return None if scores is None else scores[0]

    def scores(self, chunks: list[torch.nn.Module], shard: TrainShard) -> tuple[torch.Tensor, ...] | None:
        """What `score` gives, for each response token of the shard, without gradients: float32, flat, on the CPU.

        The same on all context-parallel ranks; None on all but the last pipeline stage.
        """

        def collect(*arguments):
            *scores, _ = arguments
            return scores[0].sum() * 0, {"scores": torch.stack(scores).cpu()}

        # Known once the first micro-batch is through, and on the last stage only.
        result: torch.Tensor | None = None
        with torch.no_grad():
            for step in shard.steps:
                micro_batches = [self._pack(shard, rows, {}) for rows in step.micro_batches]
                collected = run_micro_batches(chunks, micro_batches, self.scoring, collect, True, self.score)
                for packed, found in zip(micro_batches, collected, strict=bool(collected)):
                    if result is None:
                        size = int(shard.batch.response_offsets[-1])
                        result = torch.full((len(found["scores"]), size), torch.nan)
                    result[:, packed.response_index_N] = found["scores"]
        if not parallel_state.is_pipeline_last_stage():
            return None
        result = combined(result, parallel_state.get_context_parallel_group(), self.config.device)
        assert not result.isnan().any(), "the forward pass left response tokens without a score, or made NaN"
        return result.unbind()

    def train(self, state: TrainState, shard: TrainShard, columns: dict[str, torch.Tensor]) -> list[dict[str, float]]:
        """Take the shard's optimizer steps; returns the metrics of each step (empty dicts off the last pipeline stage).

        Args:
            columns: flat per-response-token tensors that the loss reads beside the shard's own: `old_log_probs`, and
                `ref_log_probs` with a KL loss.

        Raises:
            FloatingPointError: the gradient norm was not finite, more often in a row than --max-nonfinite-steps.
        """
        metrics = [self._step(state, shard, step, columns) for step in shard.steps]
        if self.config.overlap_param_gather:
            # What reads weights next need not be a forward pass, which would wait for them.
            for chunk in state.chunks:
                chunk.start_param_sync(force_sync=True)
        return metrics

    def _step(
        self, state: TrainState, shard: TrainShard, step: StepShard, columns: dict[str, torch.Tensor]
    ) -> dict[str, float]:
        micro_batches = [self._pack(shard, rows, columns) for rows in step.micro_batches]
        for chunk in state.chunks:
            chunk.zero_grad_buffer()
        state.optimizer.zero_grad()
        self._scale_router_losses(state, micro_batches)
        collected = run_micro_batches(state.chunks, micro_batches, self.scoring, self._loss, False, self.score)
        metrics = self.optimizer_step(state, step.weighs)
        if not collected:
            return {}
        return metrics | step_metrics.of_step(
            collected, parallel_state.get_data_parallel_group(with_context_parallel=True)
        )

    def _scale_router_losses(self, state: TrainState, micro_batches: list[PackedBatch]) -> None:
        """Make the experts' balancing losses, each a mean over a micro-batch, add up to the mean over the step.

        Megatron multiplies each with its micro-batch's tokens and leaves the division to the caller.
        """
        if not self.config.moe_aux_loss_coeff and not self.config.moe_z_loss_coeff:
            return
        tokens = torch.tensor(float(sum(len(packed.tokens_T) for packed in micro_batches)), device=self.config.device)
        dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        state.models[0].config.moe_grad_scale_func = lambda: 1 / tokens

    def _make_loss(self) -> ScoreFunction:
        """From what `score` gives of a micro-batch to its loss and metrics; raises ValueError for a bad custom one."""
        return make_loss(self.config, None if self.config.context_parallel_size == 1 else _sum_over_sequence)

    def _pack(self, shard: TrainShard, rows: list[int], columns: dict[str, torch.Tensor]) -> PackedBatch:
        cp_rank, cp_size = parallel_state.get_context_parallel_rank(), self.config.context_parallel_size
        return pack(shard.batch, rows, self.pad_multiple, self.config.device, cp_rank, cp_size, **columns)


def _sum_over_sequence(x: torch.Tensor) -> torch.Tensor:
    # The group is asked for when it is used: a sleep destroys it.
    return sum_over(parallel_state.get_context_parallel_group())(x)


class Stopwatch:
    """Seconds of named phases, as perf metrics: `with watch("log_probs")` adds to `perf/log_probs_time`."""

    def __init__(self):
        self.metrics: dict[str, float] = {}
        self._name = ""
        self._start = 0.0

    def __call__(self, name: str) -> "Stopwatch":
        self._name = f"perf/{name}_time"
        return self

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - self._start
        self.metrics[self._name] = self.metrics.get(self._name, 0.0) + elapsed
