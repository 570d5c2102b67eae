"""Group-relative advantages: grpo, gspo, cispo, dr_grpo (and reinforce_plus_plus_baseline for its rewards)."""

import numpy as np
from torch import Tensor

from miles.training.advantages.groups import Groups
from miles.training.advantages.responses import Responses


def group_relative(groups: Groups, std: bool) -> np.ndarray:
    """(r - mean) / (std + 1e-6) over each member's group, or r - mean: float64 [M].

    GRPO (https://arxiv.org/abs/2402.03300, section 4.1.2), which GSPO (https://arxiv.org/abs/2507.18071, eq. 6) and
    CISPO (https://arxiv.org/abs/2506.13585, section 3.1) take over; Dr. GRPO (https://arxiv.org/abs/2503.20783,
    section 3.2) leaves the division out. The deviation is the sample's: its squares are divided by n - 1. A group of
    one, or of equal rewards, is 0.

    Args:
        groups: the members.
        std: divide by the standard deviation.
    """
    centred_M = groups.centred()
    if not std:
        return centred_M
    sizes_M = groups.sizes_M
    variance_M = np.bincount(groups.group_M, centred_M**2)[groups.group_M] / np.maximum(sizes_M - 1, 1)
    return centred_M / (np.sqrt(variance_M) + 1e-6)


def outcome_advantages(responses: Responses, rewards_S: Tensor) -> Tensor:
    """A_t = R: each trainable token has its sample's shaped reward as advantage, float32 [n].

    "Outcome supervision" of GRPO (https://arxiv.org/abs/2402.03300, section 4.1.2).
    """
    return responses.place(responses.spread(rewards_S))
