"""One optimizer step, which changes nothing where the gradient is not finite or no token has a weight in the loss.

One gradient of NaN would make every weight NaN, and one of zeros moves weights by Adam's momentum and weight decay: the
norm is looked at before the update.
"""

import logging
import math

from miles.backends.trainer.protocol import TrainedModel

logger = logging.getLogger(__name__)


class GuardedSteps:
    """Takes a run's optimizer steps and skips those that teach nothing: no token weighs, or the norm is not finite.

    A skipped step leaves weights, moments, step counters and the learning-rate schedule as they are. The norm is that
    of the whole model's gradient, and whether a token weighs is the step's plan's to say: both are the same on all
    ranks, so that all take or skip a step together.

    Args:
        bound: steps in a row that may be skipped for their norm.
    """

    def __init__(self, bound: int):
        self.bound = bound
        self.in_a_row = 0

    def __call__(self, model: TrainedModel, weighs: bool) -> dict[str, float]:
        """One step with the gradients that `model.run` has added up.

        Args:
            weighs: whether any token of the step has a weight in its loss. Without one, experts' balancing losses are
                all that is left of the gradient, and move nothing by themselves.

        Returns:
            The metrics of the step: norm before clipping, learning rate, and whether it was skipped (1 or 0).

        Raises:
            FloatingPointError: more than `bound` steps in a row had no finite norm; the weights are those before them.
        """
        learning_rate, norm = model.learning_rate, model.gradient_norm()
        is_taken = weighs and math.isfinite(norm)
        if is_taken:
            self.in_a_row = 0
            model.apply_gradients(norm)
        elif not weighs:
            logger.warning(
                "no token counts in the loss (all are masked, or all rewards abstained) after %d optimizer steps: the "
                "step is skipped",
                model.num_steps,
            )
        else:
            self.in_a_row += 1
            what = f"the gradient norm is {norm} after {model.num_steps} optimizer steps"
            if self.in_a_row > self.bound:
                raise FloatingPointError(
                    f"{what}, {self.in_a_row} times in a row (--max-nonfinite-steps {self.bound}): lower --lr, or look "
                    "at the samples of this rollout; weights and checkpoints are unharmed"
                )
            logger.warning("%s: the step is skipped", what)
        return {
            "train/grad_norm": norm,
            "train/lr-pg_0": learning_rate,
            "train/skipped_steps": float(not is_taken),
        }
