"""One optimizer step, which changes nothing where the gradient is not finite or no token has a weight in the loss.

Megatron's own `step()` clips with the norm and then updates, whatever the norm is: one gradient of NaN makes every
weight NaN, and one of zeros moves them by Adam's momentum and weight decay. This one looks at both in between.
"""

import logging
import math

import torch
from megatron.core.optimizer import MegatronOptimizer, clip_grads

from miles.backends.megatron_utils import cpu_support
from miles.backends.megatron_utils.model import TrainState
from miles.backends.megatron_utils.torch_adam import megatron_optimizers

logger = logging.getLogger(__name__)


class GuardedSteps:
    """Takes a run's optimizer steps and skips those that teach nothing: no token weighs, or the norm is not finite.

    A skipped step leaves weights, moments, step counters and the learning-rate schedule as they are. The norm is that
    of the whole model's gradient, and whether a token weighs is the step's plan's to say: both are the same on all
    ranks, so that all take or skip a step together.

    bound: steps in a row that may be skipped for their norm.
    """

    def __init__(self, bound: int):
        self.bound = bound
        self.in_a_row = 0

    def __call__(self, state: TrainState, weighs: bool) -> dict[str, float]:
        """One step with the gradients in the model's buffers, which are reduced over all ranks.

        weighs: whether any token of the step has a weight in its loss. Without one, experts' balancing losses are all
        that is left of the gradient, and move nothing by themselves.

        Returns the metrics of the step: norm before clipping, learning rate, and whether it was skipped (1 or 0).

        Raises:
            FloatingPointError: more than `bound` steps in a row had no finite norm; the weights are those before them.
        """
        learning_rate = state.optimizer.param_groups[0]["lr"]
        norm = _clip_and_update(state.optimizer, weighs)
        taken = weighs and math.isfinite(norm)
        if taken:
            self.in_a_row = 0
            state.scheduler.step(increment=1)
        elif not weighs:
            logger.warning(
                "no token counts in the loss (all are masked, or all rewards abstained) after %d optimizer steps: the "
                "step is skipped",
                state.scheduler.num_steps,
            )
        else:
            self.in_a_row += 1
            what = f"the gradient norm is {norm} after {state.scheduler.num_steps} optimizer steps"
            if self.in_a_row > self.bound:
                raise FloatingPointError(
                    f"{what}, {self.in_a_row} times in a row (--max-nonfinite-steps {self.bound}): lower --lr, or look "
                    "at the samples of this rollout; weights and checkpoints are unharmed"
                )
            logger.warning("%s: the step is skipped", what)
        return {
            "train/grad_norm": norm,
            "train/lr-pg_0": float(learning_rate),
            "train/skipped_steps": float(not taken),
        }


@torch.no_grad()
def _clip_and_update(optimizer: MegatronOptimizer, weighs: bool) -> float:
    """Clip and update as `optimizer.step()` does, but only if `weighs` and the norm, which is returned, is finite."""
    with cpu_support.cuda_type_names():
        overflowed = optimizer.prepare_grads()
        assert not overflowed, "only fp16 has a loss scale that can overflow"
        norm = float(optimizer.get_grad_norm())
        if not (weighs and math.isfinite(norm)):
            return norm
        for part in megatron_optimizers(optimizer):
            parameters = part.get_parameters()
            if parameters and part.config.clip_grad > 0:
                clip_grads.clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, norm)
        succeeded = optimizer.step_with_ready_grads()
        assert succeeded
    return norm
