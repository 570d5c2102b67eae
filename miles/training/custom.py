"""Two functions of the user's own in the loss, each named by a dotted path.

`--loss-type custom_loss --custom-loss-function-path package.module.function` takes the place of the policy loss:

    def loss(config, log_probs_N, entropy_N, packed, sums):
        loss_N = -log_probs_N * packed.columns["advantages"]
        loss = weighted_sum(loss_N, packed.weight_N)
        return loss, {"train/loss": loss}

`--custom-tis-function-path package.module.function` takes the place of `--use-tis`: it weighs the policy loss of each
token for the difference between engine and trainer.

    def weights(config, old_N, rollout_N, packed, sums):
        weight_N = (old_N - rollout_N).exp().clamp(max=3)
        return weight_N, {"train/tis": weighted_sum(weight_N, packed.metric_weight_N)}

What they are given:

- config: the run's `RunConfig`.
- log_probs_N, entropy_N: of each response token under the model in training, with gradient (the entropy's only if
  `--entropy-coef` isn't 0); old_N, rollout_N: log-probabilities under the trainer before its update, and under the
  engine, without gradient. All are 0 at masked tokens.
- packed: the micro-batch (`miles.training.packing.PackedBatch`). `columns` has `advantages`, `rollout_log_probs`,
  `old_log_probs` (unless `--use-rollout-logprobs` or `--skip-actor-forward-only`), and `ref_log_probs` with
  `--use-kl-loss`; they may hold anything at masked tokens.
- sums: `miles.training.sample_sums.SampleSums`, for what needs whole samples: a sample's tokens may lie on several
  ranks. All ranks must call it in the same order.

What they return: the loss, a scalar with gradient, added up with `packed.weight_N` over the micro-batch's tokens and
never divided (`miles.training.losses.weighted_sum`); or weights [N], to which no gradient flows. And metrics, scalar
tensors by the name under which they are reported, the same names for every micro-batch: sums weighted with
`packed.metric_weight_N`, or, if the name ends in _max or _min, extremes.
"""

from collections.abc import Callable

import torch

from miles.utils.dotted_path import load_function

Metrics = dict[str, torch.Tensor]


def load_custom_loss(path: str) -> Callable[..., tuple[torch.Tensor, Metrics]]:
    """The function at `--custom-loss-function-path`; ValueError if it can't be imported or called as said above."""
    return load_function("--custom-loss-function-path", path, "config", "log_probs_N", "entropy_N", "packed", "sums")


def load_custom_tis(path: str) -> Callable[..., tuple[torch.Tensor, Metrics]]:
    """The function at `--custom-tis-function-path`; ValueError if it can't be imported or called as said above."""
    return load_function("--custom-tis-function-path", path, "config", "old_N", "rollout_N", "packed", "sums")
