"""Dr. GRPO (https://arxiv.org/abs/2503.20783, section 3.2): r - mean, and losses divided by a constant length."""

from miles.training.advantages.estimator import Estimator, centred_rewards

DR_GRPO = Estimator(name="dr_grpo", compare=centred_rewards, constant_length=True)
