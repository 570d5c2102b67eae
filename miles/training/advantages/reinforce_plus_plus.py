"""REINFORCE++ (https://arxiv.org/abs/2501.03262): no critic, a KL penalty in the reward, advantages to be whitened."""

from miles.training.advantages.estimator import AdvantageInputs, Advantages, Estimator


def discounted_returns(inputs: AdvantageInputs) -> Advantages:
    """The discounted return: A_t = r_t + gamma A_(t+1), r_t = -kl_coef kl_t + [t is the last token] R.

    Over the trainable tokens alone: others are no steps of time, and have neither a KL nor a discount.
    """
    responses = inputs.responses
    rewards_m = inputs.penalised(responses.at_last(inputs.rewards_S))
    return Advantages(responses.place(responses.discounted_sums(rewards_m, inputs.gamma)))


REINFORCE_PLUS_PLUS = Estimator(
    name="reinforce_plus_plus", advantages=discounted_returns, discounts=True, kl_in_reward=True, whitens=True
)
