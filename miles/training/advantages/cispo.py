"""CISPO (https://arxiv.org/abs/2506.13585, section 3.1): GRPO's advantages, and the clipped ratio as a weight."""

from miles.training.advantages.estimator import Estimator, centred_rewards

CISPO = Estimator(name="cispo", compare=centred_rewards, divides_by_std=True, loss="clipped_weight")
