"""What an estimator is: one record. The configuration reads it, so that neither numpy nor torch is imported here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from miles.training.advantages.groups import Groups
    from miles.training.advantages.responses import Responses

# The clipped loss of each token's ratio, or of its sequence's (GSPO), or the clipped ratio as a weight (CISPO).
LossForm = Literal["clip", "sequence_clip", "clipped_weight"]


class Advantages(NamedTuple):
    """What tokens are trained with: float32 [n] each, 0 at masked tokens.

    Args:
        advantages: of each response token.
        returns: target of the critic's value there; None without a critic.
    """

    advantages: "Tensor"
    returns: "Tensor | None" = None


@dataclass(frozen=True)
class AdvantageInputs:
    """What advantages are computed from, for whole samples, on the CPU.

    What stands at masked tokens of `kl` and `values`, NaN included, is not read.

    Args:
        responses: the tokens, and which of them are trained on.
        rewards_S: float [S], from `shape_rewards`.
        kl: float [n], estimate of KL(model || reference) at each token; None where `kl_coef` is 0.
        kl_coef: its weight in the reward, for an estimator with `kl_in_reward`.
        values: float [n], the critic's values; None without a `critic`.
        gamma: discount of later rewards, for an estimator that `discounts`.
        lambd: lambda of generalised advantage estimation, for one with a `critic`.
    """

    responses: "Responses"
    rewards_S: "Tensor"
    kl: "Tensor | None" = None
    kl_coef: float = 0.0
    values: "Tensor | None" = None
    gamma: float = 1.0
    lambd: float = 1.0

    def penalised(self, rewards_m: "Tensor") -> "Tensor":
        """The rewards of trainable tokens minus `kl_coef` times their KL: float64 [m] to [m]."""
        if self.kl is None or not self.kl_coef:
            return rewards_m
        return rewards_m - self.kl_coef * self.responses.select(self.kl)


def centred_rewards(groups: "Groups") -> "np.ndarray":
    """r - mean over each member's group: float64 [M]."""
    return groups.centred()


def outcome_advantages(inputs: AdvantageInputs) -> Advantages:
    """A_t = R: each trainable token has its sample's shaped reward as advantage.

    "Outcome supervision" of GRPO (https://arxiv.org/abs/2402.03300, section 4.1.2).
    """
    return Advantages(inputs.responses.place(inputs.responses.spread(inputs.rewards_S)))


@dataclass(frozen=True)
class Estimator:
    """One value of --advantage-estimator: its formulas, and what the flags must know of it.

    Args:
        name: the value.
        compare: what the rewards of a group's members become beside each other, float64 [M]; None: the group does not
            count, and rewards stay as they are.
        divides_by_std: the result is divided by the group's standard deviation (`Groups.deviations`), unless
            --disable-grpo-std-normalization is given.
        advantages: from shaped rewards to the advantage of each token.
        discounts: --gamma counts.
        kl_in_reward: --kl-coef is allowed.
        whitens: the advantages need --normalize-advantages, which is on then.
        critic: a critic is trained, whose values the advantages are computed from; --lambd counts.
        loss: the form of the policy loss.
        constant_length: --constant-loss-length is --rollout-max-response-len where it is not given.
    """

    name: str
    compare: "Callable[[Groups], np.ndarray] | None" = None
    divides_by_std: bool = False
    advantages: Callable[[AdvantageInputs], Advantages] = outcome_advantages
    discounts: bool = False
    kl_in_reward: bool = False
    whitens: bool = False
    critic: bool = False
    loss: LossForm = "clip"
    constant_length: bool = False


def compute_advantages(estimator: Estimator, inputs: AdvantageInputs) -> Advantages:
    """The advantage of each response token, before whitening."""
    kl, values = inputs.kl, inputs.values
    assert inputs.kl_coef == 0 or (estimator.kl_in_reward and kl is not None), (
        f"{estimator.name} with kl_coef {inputs.kl_coef}, kl {kl}"
    )
    assert (values is not None) == estimator.critic, f"{estimator.name} with values {values}"
    return estimator.advantages(inputs)
