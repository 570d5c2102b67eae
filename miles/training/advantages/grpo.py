"""GRPO (https://arxiv.org/abs/2402.03300, section 4.1.2): (r - mean) / (std + 1e-6) over the group.

A group of one, or of equal rewards, is 0.
"""

from miles.training.advantages.estimator import Estimator, centred_rewards

GRPO = Estimator(name="grpo", compare=centred_rewards, divides_by_std=True)
