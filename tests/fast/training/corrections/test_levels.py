import math

import pytest
import torch

from miles.training.corrections import log_ratio_at
from tests.fast.training.micro_batches import nested, sums_of

MASKS = [[1, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]]
LOG_RATIOS = [[0.3, math.inf, -0.1, 0.1], [math.nan, -0.2, -0.4, 9.0], [math.nan] * 4]


@pytest.mark.parametrize("level, expected", [("sequence", [0.3, -0.6, 0.0]), ("geometric", [0.1, -0.3, 0.0])])
def test_of_sequences(level, expected):
    result_N = log_ratio_at(level, torch.tensor(LOG_RATIOS).flatten(), sums_of(MASKS))
    assert nested(result_N, MASKS) == [pytest.approx([x] * 4, abs=1e-6) for x in expected]


def test_of_tokens():
    log_ratio_N = torch.tensor([[0.3, 0.5, -0.1, 0.1]] * 3).flatten()
    assert torch.equal(log_ratio_at("token", log_ratio_N, sums_of(MASKS)), log_ratio_N)
