"""From rewards to the advantage of each token, one file an algorithm: pure functions of tensors."""

from miles.training.advantages.estimators import Advantages, compute_advantages, shape_rewards
from miles.training.advantages.groups import counted_rewards
from miles.training.advantages.responses import Responses
from miles.training.advantages.whitening import whiten

__all__ = [
    "Advantages",
    "Responses",
    "compute_advantages",
    "counted_rewards",
    "shape_rewards",
    "whiten",
]
