"""The policy losses of two public packages, TRL and verl, called with the same padded tensors [S, T].

verl's are functions. TRL's is a method of its trainer, here of one without a model: it is given the log-probabilities
that the model would have computed.
"""

import contextlib
import logging
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch

with contextlib.ExitStack() as _stack:
    # verl configures the root logger on import.
    _stack.callback(logging.root.setLevel, logging.root.level)
    _stack.callback(logging.root.handlers.__setitem__, slice(None), logging.root.handlers[:])
    from trl import GRPOTrainer
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.workers.config import ActorConfig

__all__ = ["core_algos", "rollout_corr_helper", "trl_loss", "verl_loss"]


def verl_loss(
    kind: str, log_probs: torch.Tensor, data: dict[str, torch.Tensor], mean: str, weights: Any = None, **settings: Any
) -> torch.Tensor:
    """The policy loss that verl registers as `kind`: vanilla, gspo or cispo.

    Args:
        log_probs: [S, T], with gradient.
        data: `old`, `advantages` and `mask`, [S, T].
        mean: its `loss_agg_mode`.
        weights: its importance weights, or None.
        **settings: fields of its ActorConfig.
    """
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **settings)
    if config.loss_scale_factor is not None:
        config.global_batch_info["loss_scale_factor"] = config.loss_scale_factor  # as its workers do
    loss, _ = core_algos.get_policy_loss_fn(kind)(
        data["old"], log_probs, data["advantages"], data["mask"].float(), mean, config, weights
    )
    return loss


class _Trainer(GRPOTrainer):
    """GRPOTrainer's loss without the trainer: its settings, and outputs of a model that are given."""

    def __init__(self, outputs: tuple[torch.Tensor, torch.Tensor], length: int, **settings: Any):
        self.outputs = outputs
        self.model = SimpleNamespace(training=True)
        self.accelerator = SimpleNamespace(
            num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x
        )
        self._metrics = defaultdict(lambda: defaultdict(list))
        self.current_gradient_accumulation_steps, self.max_completion_length = 1, length
        self.top_entropy_quantile, self.aux_loss_enabled = 1.0, False
        self.use_adaptive_entropy, self.entropy_coef = False, settings.pop("entropy_coef", 0.0)
        self._entropy_bonus_enabled = self.entropy_coef != 0
        self.vllm_importance_sampling_correction = self.use_vllm = settings.pop("weighted", False)
        self.args = SimpleNamespace(
            delta=settings.pop("delta", None),
            use_bias_correction_kl=settings.pop("use_bias_correction_kl", False),
            steps_per_generation=1,
        )
        defaults = {
            "importance_sampling_level": "token",
            "beta": 0.0,
            "loss_type": "bnpo",
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "off_policy_mask_threshold": None,
        }
        assert settings.keys() <= defaults.keys(), settings
        self.__dict__.update(defaults | settings)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any):
        return *self.outputs, None


def trl_loss(
    log_probs: torch.Tensor, data: dict[str, torch.Tensor], weights: torch.Tensor | None = None, **settings: Any
) -> torch.Tensor:
    """GRPOTrainer's loss of one micro-batch that is the whole step.

    Args:
        log_probs: [S, T], with gradient.
        data: `old`, `ref`, `entropy`, `advantages` and `mask`, [S, T]; an advantage is its sample's.
        weights: importance weights [S, T].
        **settings: fields of GRPOConfig.
    """
    length = settings.pop("max_completion_length", log_probs.shape[1])
    trainer = _Trainer((log_probs, data["entropy"]), length, weighted=weights is not None, **settings)
    mask = data["mask"].long()
    prompt = torch.ones(len(mask), 1, dtype=torch.long)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt,
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": data["advantages"][:, 0],
        "old_per_token_logps": data["old"],
        "ref_per_token_logps": data["ref"],
        "importance_sampling_ratio": weights,
        "num_items_in_batch": mask.sum(),
    }
    return trainer._compute_loss(None, inputs)
