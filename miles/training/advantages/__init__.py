"""From rewards to the advantage of each token: one file an estimator, with its formulas and its record.

Only `groups` imports numpy, and `responses` and `whitening` torch: the configuration reads the records.
"""

from collections.abc import Callable

from miles.training.advantages.cispo import CISPO
from miles.training.advantages.dr_grpo import DR_GRPO
from miles.training.advantages.estimator import AdvantageInputs, Advantages, Estimator, LossForm
from miles.training.advantages.grpo import GRPO
from miles.training.advantages.gspo import GSPO
from miles.training.advantages.ppo import PPO
from miles.training.advantages.reinforce_plus_plus import REINFORCE_PLUS_PLUS
from miles.training.advantages.reinforce_plus_plus_baseline import REINFORCE_PLUS_PLUS_BASELINE
from miles.training.advantages.rloo import RLOO

__all__ = ["ESTIMATORS", "AdvantageInputs", "Advantages", "Estimator", "LossForm", "estimators_where"]

# In the order in which people read them. The first is the default.
_RECORDS = (GRPO, GSPO, CISPO, RLOO, DR_GRPO, REINFORCE_PLUS_PLUS, REINFORCE_PLUS_PLUS_BASELINE, PPO)
ESTIMATORS: dict[str, Estimator] = {estimator.name: estimator for estimator in _RECORDS}


def estimators_where(holds: Callable[[Estimator], bool], last: str = " and ") -> str:
    """The names of the estimators of which something holds, for a sentence: `a, b and c`."""
    *names, name = (estimator.name for estimator in ESTIMATORS.values() if holds(estimator))
    return f"{', '.join(names)}{last}{name}" if names else name
