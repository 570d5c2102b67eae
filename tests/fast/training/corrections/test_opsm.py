import math

import torch

from miles.training.corrections import off_policy_sequences
from tests.fast.training.micro_batches import nested, sums_of

MASKS = [[1, 0, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1], [0] * 4]
# Current minus old: the means of old minus current are 0.2, -0.2, 0.2 and, of nothing, 0.
LOG_RATIOS = [[-0.5, math.nan, 0.1, -0.2], [0.5, -0.1, 0.2, math.inf], [-0.2] * 4, [math.nan] * 4]


def left_out(advantages, delta):
    log_ratio_N, adv_N = torch.tensor(LOG_RATIOS).flatten(), torch.tensor(advantages).flatten()
    return nested(off_policy_sequences(log_ratio_N, adv_N, delta, sums_of(MASKS)), MASKS)


def test_samples_of_four_tokens():
    negative = [[-1.0] * 4] * 4
    assert left_out(negative, 0.19) == [[True] * 4, [False] * 4, [True] * 4, [False] * 4]
    assert left_out(negative, 0.21) == [[False] * 4] * 4
    # The sign matters: a model that has become likelier to write the tokens keeps them, however far it went.
    assert left_out(negative, 0.0)[1] == [False] * 4


def test_positive_advantages_stay():
    assert left_out([[1.0] * 4, [1.0] * 4, [0.0] * 4, [1.0] * 4], 0.0) == [[False] * 4] * 4


def test_each_token_has_its_own_advantage():
    advantages = [[-1.0, 0.0, 1.0, -1.0], [-1.0] * 4, [1.0, -1.0, -1.0, 1.0], [0.0] * 4]
    assert left_out(advantages, 0.1) == [
        [True, False, False, True],
        [False] * 4,
        [False, True, True, False],
        [False] * 4,
    ]
