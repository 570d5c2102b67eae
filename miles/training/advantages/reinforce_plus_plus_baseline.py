"""REINFORCE++ with baseline (https://arxiv.org/abs/2501.03262): r - mean of the group, to be whitened."""

from miles.training.advantages.estimator import AdvantageInputs, Advantages, Estimator, centred_rewards


def penalised_outcomes(inputs: AdvantageInputs) -> Advantages:
    """A_t = R - kl_coef kl_t, with R the reward minus its group's mean."""
    return Advantages(inputs.responses.place(inputs.penalised(inputs.responses.spread(inputs.rewards_S))))


REINFORCE_PLUS_PLUS_BASELINE = Estimator(
    name="reinforce_plus_plus_baseline",
    compare=centred_rewards,
    advantages=penalised_outcomes,
    kl_in_reward=True,
    whitens=True,
)
