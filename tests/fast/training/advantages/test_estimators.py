import math

import pytest
import torch

from miles.config.algorithm import AlgorithmConfig
from miles.training.advantages import ESTIMATORS, AdvantageInputs, estimators_where
from miles.training.advantages.estimator import compute_advantages
from miles.training.advantages.groups import shape_rewards
from miles.training.advantages.responses import Responses

RESPONSES = Responses(torch.tensor([0, 2, 4]), torch.tensor([True, True, True, False]))
REWARDS = torch.tensor([0.5, -1.0])
# What each has besides its formulas; of those that are not listed, their test says.
PROPERTIES = {
    "grpo": {"compare", "divides_by_std"},
    "gspo": {"compare", "divides_by_std"},
    "cispo": {"compare", "divides_by_std"},
    "rloo": {"compare"},
    "dr_grpo": {"compare", "constant_length"},
    "reinforce_plus_plus": {"discounts", "kl_in_reward", "whitens"},
    "reinforce_plus_plus_baseline": {"compare", "kl_in_reward", "whitens"},
    "ppo": {"discounts", "critic"},
}
LOSSES = {"gspo": "sequence_clip", "cispo": "clipped_weight"}


def compute(estimator, **options):
    defaults = {"values": torch.zeros(4)} if estimator == "ppo" else {}
    return compute_advantages(ESTIMATORS[estimator], AdvantageInputs(RESPONSES, REWARDS, **defaults | options))


@pytest.mark.parametrize("estimator", PROPERTIES)
def test_properties(estimator):
    record = ESTIMATORS[estimator]
    names = ("compare", "divides_by_std", "discounts", "kl_in_reward", "whitens", "critic", "constant_length")
    assert {name for name in names if getattr(record, name)} == PROPERTIES[estimator]
    assert record.name == estimator and record.loss == LOSSES.get(estimator, "clip")


def test_the_flag_has_every_estimator_and_the_first_is_the_default():
    field = AlgorithmConfig.model_fields["advantage_estimator"]
    assert field.annotation.__args__ == tuple(ESTIMATORS) and field.default == "grpo"
    assert set(PROPERTIES) <= set(ESTIMATORS)


def test_names_for_a_sentence():
    assert estimators_where(lambda estimator: estimator.loss != "clip", " or ") == "gspo or cispo"
    assert estimators_where(lambda estimator: estimator.critic) == "ppo"
    assert estimators_where(lambda estimator: estimator.divides_by_std) == "grpo, gspo and cispo"


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="'grp'"):
        AlgorithmConfig(advantage_estimator="grp")


@pytest.mark.parametrize("estimator", PROPERTIES)
def test_every_estimator_of_the_flag_gives_the_reward_where_nothing_else_counts(estimator):
    assert len(PROPERTIES) == 8
    assert shape_rewards(ESTIMATORS[estimator], [1.0, 0.0], [0, 0], [0, 1], std=True).shape == (2,)
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


@pytest.mark.parametrize("estimator", PROPERTIES)
def test_masked_tokens_are_never_read(estimator):
    nan = torch.tensor([0.0, 0.0, 0.0, math.nan])
    options = {"values": nan} if estimator == "ppo" else {}
    if estimator.startswith("reinforce"):
        options = {"kl": nan, "kl_coef": 1.0}
    assert compute(estimator, **options).advantages.tolist() == [0.5, 0.5, -1, 0]


@pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)
def test_whatever_the_estimator_a_masked_token_is_zero_and_not_read(estimator):
    nan = torch.tensor([0.5, 1.0, -0.5, math.nan])
    options = {"values": nan} if estimator.critic else {}
    if estimator.kl_in_reward:
        options |= {"kl": nan, "kl_coef": 1.0}
    columns = compute_advantages(estimator, AdvantageInputs(RESPONSES, REWARDS, **options))
    assert (columns.returns is not None) == estimator.critic
    for column in columns if estimator.critic else columns[:1]:
        assert column.dtype == torch.float32 and column.isfinite().all() and column[3] == 0
    shaped = shape_rewards(estimator, [1.0, None, 0.25], [0, 0, 1], range(3))
    assert shaped.dtype.name == "float32" and shaped.shape == (3,) and shaped[1] == 0
