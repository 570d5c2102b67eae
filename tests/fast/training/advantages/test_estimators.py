import math

import pytest
import torch

from miles.config.algorithm import AlgorithmConfig
from miles.training.advantages import Responses, compute_advantages, shape_rewards

RESPONSES = Responses(torch.tensor([0, 2, 4]), torch.tensor([True, True, True, False]))
REWARDS = torch.tensor([0.5, -1.0])
ESTIMATORS = AlgorithmConfig.model_fields["advantage_estimator"].annotation.__args__


def compute(estimator, **options):
    defaults = dict(kl=None, kl_coef=0.0, values=torch.zeros(4) if estimator == "ppo" else None, gamma=1.0, lambd=1.0)
    return compute_advantages(estimator, RESPONSES, REWARDS, **defaults | options)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_of_the_flag_gives_the_reward_where_nothing_else_counts(estimator):
    assert len(ESTIMATORS) == 8
    assert shape_rewards(estimator, [1.0, 0.0], [0, 0], [0, 1], std=True).shape == (2,)
    advantages, returns = compute(estimator)
    assert advantages.tolist() == [0.5, 0.5, -1, 0] and advantages.dtype == torch.float32
    assert (returns is not None) == (estimator == "ppo")


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "dr_grpo", "rloo"])
def test_group_estimators_have_no_discount(estimator):
    assert compute(estimator, gamma=0.5, lambd=0.5).advantages.tolist() == [0.5, 0.5, -1, 0]


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "dr_grpo", "rloo", "ppo"])
def test_a_kl_in_the_reward_is_for_reinforce_plus_plus(estimator):
    with pytest.raises(AssertionError, match=f"{estimator} with kl_coef 0.1"):
        compute(estimator, kl=torch.zeros(4), kl_coef=0.1)


def test_what_an_estimator_needs_must_be_there():
    with pytest.raises(AssertionError, match="kl None"):
        compute("reinforce_plus_plus", kl_coef=0.1)
    with pytest.raises(AssertionError, match="ppo with values None"):
        compute("ppo", values=None)
    with pytest.raises(AssertionError, match="grpo with values"):
        compute("grpo", values=torch.zeros(4))
    with pytest.raises(AssertionError, match="'grp' is unknown"):
        compute("grp")


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_masked_tokens_are_never_read(estimator):
    nan = torch.tensor([0.0, 0.0, 0.0, math.nan])
    options = {"values": nan} if estimator == "ppo" else {}
    if estimator.startswith("reinforce"):
        options = {"kl": nan, "kl_coef": 1.0}
    assert compute(estimator, **options).advantages.tolist() == [0.5, 0.5, -1, 0]
