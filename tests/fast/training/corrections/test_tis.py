import math

import pytest
import torch

from miles.training.corrections import TisSettings, importance_weights
from tests.fast.training.micro_batches import sums_of

MASKS = [[1, 0, 1, 1], [1, 1, 1, 0]]
# Ratio of trainer to engine; 1 at masked tokens, as compute_policy_loss hands them over.
RATIOS = [[0.4, 1.0, 1.5, 4.0], [0.5, 0.8, 0.5, 1.0]]
SEQUENCE = [0.4 * 1.5 * 4.0, 0.5 * 0.8 * 0.5]
GEOMETRIC = [SEQUENCE[0] ** (1 / 3), SEQUENCE[1] ** (1 / 3)]
LEVELS = {
    "token": RATIOS,
    "sequence": [[SEQUENCE[0]] * 4, [SEQUENCE[1]] * 4],
    "geometric": [[GEOMETRIC[0]] * 4, [GEOMETRIC[1]] * 4],
}


def weigh(level, mode, low, high):
    log_ratio_N = torch.tensor(RATIOS).log().flatten()
    return importance_weights(log_ratio_N, TisSettings(level, mode, low, high), sums_of(MASKS))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("low, high", [(0.0, 2.0), (0.45, 1.45), (0.7, 1.2)])
def test_two_samples_of_four_tokens(level, mode, low, high):
    ratios = sum(LEVELS[level], [])
    inside = [low <= ratio <= high for ratio in ratios]
    # IcePop's M(r): r itself within the range, not 1.
    out = [min(max(ratio, low), high) if mode == "truncate" else 0.0 for ratio in ratios]
    weight_N, metrics = weigh(level, mode, low, high)
    assert weight_N.tolist() == pytest.approx([r if i else o for r, i, o in zip(ratios, inside, out, strict=True)])
    assert metrics["tis"].tolist() == pytest.approx(ratios)
    assert metrics["tis_clipfrac"].tolist() == [not i for i in inside]
    assert metrics["tis_abs"].tolist() == pytest.approx([abs(ratio - 1) for ratio in ratios], abs=1e-6)
    assert metrics.keys() == {"tis", "tis_clipfrac", "tis_abs"}


def test_the_cases_above_differ():
    """Some tokens are in and some are out, at each level and with each bound."""
    assert [weigh(level, "mask", 0.45, 1.45)[0].count_nonzero().item() for level in LEVELS] == [5, 0, 8]
    assert [weigh(level, "mask", 0.7, 1.2)[0].count_nonzero().item() for level in LEVELS] == [3, 0, 0]
    assert [weigh(level, "mask", 0.0, 2.0)[0].count_nonzero().item() for level in LEVELS] == [7, 4, 8]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("log_ratio, truncated", [(200.0, 2.0), (-200.0, 0.5)])
def test_a_ratio_of_e_to_the_200(level, log_ratio, truncated):
    log_ratio_N, sums = torch.full((8,), log_ratio), sums_of([[1] * 4] * 2)
    weight_N, metrics = importance_weights(log_ratio_N, TisSettings(level, "truncate", 0.5, 2.0), sums)
    assert weight_N.tolist() == [truncated] * 8
    assert metrics["tis"].tolist() == pytest.approx([math.exp(math.copysign(20, log_ratio))] * 8)
    weight_N, _ = importance_weights(log_ratio_N, TisSettings(level, "mask", 0.5, 2.0), sums)
    assert weight_N.tolist() == [0] * 8
