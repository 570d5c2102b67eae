"""PPO: a critic's values, and generalised advantage estimation (https://arxiv.org/abs/1506.02438)."""

from miles.training.advantages.estimator import AdvantageInputs, Advantages, Estimator


def gae(inputs: AdvantageInputs) -> Advantages:
    """A_t = delta_t + gamma lambd A_(t+1), delta_t = r_t + gamma V_(t+1) - V_t; the value's target is A_t + V_t.

    Eq. 16. r_t is the sample's reward at its last trainable token, else 0. The next token is the next trainable one:
    what a tool wrote is no step. After the last one V is 0, also where the response was cut off at the length limit.
    """
    responses, gamma = inputs.responses, inputs.gamma
    assert inputs.values is not None
    values_m, rewards_m = responses.select(inputs.values), responses.at_last(inputs.rewards_S)
    deltas_m = rewards_m + gamma * responses.following(values_m) - values_m
    advantages_m = responses.discounted_sums(deltas_m, gamma * inputs.lambd)
    return Advantages(responses.place(advantages_m), responses.place(advantages_m + values_m))


PPO = Estimator(name="ppo", advantages=gae, discounts=True, critic=True)
