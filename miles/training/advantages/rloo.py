"""REINFORCE leave-one-out (https://arxiv.org/abs/2402.14740)."""

from typing import TYPE_CHECKING

from miles.training.advantages.estimator import Estimator

if TYPE_CHECKING:
    import numpy as np

    from miles.training.advantages.groups import Groups


def leave_one_out(groups: "Groups") -> "np.ndarray":
    """r - mean of the OTHER members of its group, which is n / (n - 1) (r - mean): float64 [M].

    RLOO, after Kool et al. 2019 (https://openreview.net/forum?id=r1lgTGL5DE). A group of one, or of equal rewards,
    is 0.
    """
    sizes_M = groups.sizes_M
    return groups.centred() * (sizes_M / (sizes_M - 1).clip(1))


RLOO = Estimator(name="rloo", compare=leave_one_out)
