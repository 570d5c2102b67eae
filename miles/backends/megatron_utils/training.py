"""Forward and training passes of one rank over its shard of a rollout.

Every loss and metric is a sum with weights that add up to one over the whole step (see miles/training/schedule.py), so
micro-batches, data-parallel ranks and their gradients are only ever added.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model

from miles.backends.megatron_utils import cpu_support
from miles.backends.megatron_utils.layers import packed_sequences
from miles.backends.megatron_utils.logits import response_logits
from miles.backends.megatron_utils.model import TrainState
from miles.config import RunConfig
from miles.training.packing import PackedBatch, pack
from miles.training.policy import compute_policy_loss, compute_sft_loss
from miles.training.schedule import TrainShard
from miles.training.vocab_parallel import log_probs_and_entropy

# From the logits [N, V of this rank] of a micro-batch's response tokens to (loss, what to collect).
LogitsFunction = Callable[[torch.Tensor, PackedBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def run_micro_batches(
    model: torch.nn.Module, micro_batches: Sequence[PackedBatch], function: LogitsFunction, forward_only: bool
) -> list[dict[str, torch.Tensor]]:
    """One pass of Megatron's pipeline schedule over `micro_batches`; with gradients unless `forward_only`.

    Returns what `function` collected for each micro-batch, on the last pipeline stage; elsewhere an empty list.
    """

    def forward_step(iterator, model):
        packed = next(iterator)
        rotary = unwrap_model(model).rotary
        boundaries = packed_sequences(packed.cu_seqlens, packed.position_ids_T, packed.max_seqlen, rotary)
        output = model(
            packed.tokens_T[None],
            packed.position_ids_T[None],
            None,
            packed_seq_params=boundaries,
            output_processor=response_logits,
            output_processor_context=packed,
        )

        def finish(logits_NV: torch.Tensor):
            loss, collected = function(logits_NV, packed)
            # The second value would divide the loss; it is divided already.
            return loss, torch.ones((), dtype=torch.int, device=loss.device), collected

        return output, finish

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micro_batches),
        model=model,
        num_microbatches=len(micro_batches),
        seq_length=len(micro_batches[0].tokens_T),
        micro_batch_size=1,
        forward_only=forward_only,
    )


class ShardTrainer:
    """Runs the passes that a rollout needs on one rank's model.

    Args:
        config: the run's configuration.
        vocab_size: size of the vocabulary without padding.
    """

    def __init__(self, config: RunConfig, vocab_size: int):
        self.config = config
        self.vocab_size = vocab_size
        self.pad_multiple = config.data_pad_size_multiplier * config.tensor_model_parallel_size

    def log_probs(self, model: torch.nn.Module, shard: TrainShard) -> torch.Tensor | None:
        """Log-probability of each response token of the shard under `model`'s weights: float32, flat, on the CPU.

        None on all but the last pipeline stage.
        """

        def collect(logits_NV: torch.Tensor, packed: PackedBatch):
            log_probs_N, _ = self._log_probs_and_entropy(logits_NV, packed, entropy_grad=False)
            return log_probs_N.sum() * 0, {"log_probs": log_probs_N.cpu()}

        result = torch.full((int(shard.batch.response_offsets[-1]),), torch.nan)
        with torch.no_grad():
            for step in shard.steps:
                micro_batches = [self._pack(shard, rows, {}) for rows in step.micro_batches]
                collected = run_micro_batches(model, micro_batches, collect, forward_only=True)
                for packed, values in zip(micro_batches, collected, strict=bool(collected)):
                    result[packed.response_index_N] = values["log_probs"]
        if not parallel_state.is_pipeline_last_stage():
            return None
        assert not result.isnan().any(), "the forward pass left response tokens without a log-probability, or made NaN"
        return result

    def train(self, state: TrainState, shard: TrainShard, columns: dict[str, torch.Tensor]) -> list[dict[str, float]]:
        """Take the shard's optimizer steps; returns the metrics of each step (empty dicts off the last pipeline stage).

        Args:
            columns: flat per-response-token tensors that the loss reads beside the shard's own: `old_log_probs`, and
                `ref_log_probs` with a KL loss.

        Raises:
            FloatingPointError: the gradient norm is not finite; the weights are then unusable.
        """
        return [self._step(state, shard, step.micro_batches, columns) for step in shard.steps]

    def _step(
        self, state: TrainState, shard: TrainShard, micro_batch_rows: list[list[int]], columns: dict[str, torch.Tensor]
    ) -> dict[str, float]:
        micro_batches = [self._pack(shard, rows, columns) for rows in micro_batch_rows]
        state.model.zero_grad_buffer()
        state.optimizer.zero_grad()
        collected = run_micro_batches(state.model, micro_batches, self._loss, forward_only=False)
        with cpu_support.cuda_type_names():
            _, grad_norm, _ = state.optimizer.step()
        if not np.isfinite(grad_norm):
            raise FloatingPointError(
                f"the gradient norm is {grad_norm} at optimizer step {state.scheduler.num_steps}: lower --lr, or look "
                "at this rollout's samples; the last checkpoint is unharmed"
            )
        learning_rate = state.optimizer.param_groups[0]["lr"]
        state.scheduler.step(increment=1)
        if not collected:
            return {}
        names = sorted(collected[0])
        totals = torch.stack([sum(metrics[name].float() for metrics in collected) for name in names])
        dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
        metrics = dict(zip(names, totals.tolist(), strict=True))
        return metrics | {"train/grad_norm": float(grad_norm), "train/lr-pg_0": float(learning_rate)}

    def _loss(self, logits_NV: torch.Tensor, packed: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        config = self.config
        log_probs_N, entropy_N = self._log_probs_and_entropy(logits_NV, packed, entropy_grad=config.entropy_coef != 0)
        if config.loss_type == "sft_loss":
            return compute_sft_loss(log_probs_N, packed)
        return compute_policy_loss(
            log_probs_N,
            entropy_N,
            packed,
            eps_clip=config.eps_clip,
            eps_clip_high=config.eps_clip_high,
            eps_clip_c=config.eps_clip_c,
            entropy_coef=config.entropy_coef,
            use_kl_loss=config.use_kl_loss,
            kl_loss_coef=config.kl_loss_coef,
            kl_loss_type=config.kl_loss_type,
            use_rollout_logprobs=config.use_rollout_logprobs,
        )

    def _log_probs_and_entropy(
        self, logits_NV: torch.Tensor, packed: PackedBatch, entropy_grad: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Supervised samples were not drawn at a temperature.
        temperature = 1.0 if self.config.loss_type == "sft_loss" else self.config.rollout_temperature
        return log_probs_and_entropy(
            logits_NV,
            packed.target_N,
            temperature,
            group=parallel_state.get_tensor_model_parallel_group(),
            entropy_grad=entropy_grad,
            vocab_size=self.vocab_size,
        )

    def _pack(self, shard: TrainShard, rows: list[int], columns: dict[str, torch.Tensor]) -> PackedBatch:
        return pack(shard.batch, rows, self.pad_multiple, self.config.device, **columns)


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
