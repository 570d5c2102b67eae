"""GSPO (https://arxiv.org/abs/2507.18071, eq. 6): GRPO's advantages, and one probability ratio a sequence."""

from miles.training.advantages.estimator import Estimator, centred_rewards

GSPO = Estimator(name="gspo", compare=centred_rewards, divides_by_std=True, loss="sequence_clip")
