import math

import pytest
import torch

from miles.training.losses import clip_loss, sequence_log_ratio
from tests.fast.training.micro_batches import nested, sums_of

MASKS = [[1, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]]
LOG_RATIOS = [[0.3, math.inf, -0.1, 0.1], [math.nan, -0.2, -0.4, 9.0], [math.nan] * 4]
MEANS = [0.1, -0.3, 0.0]


def test_every_token_has_its_sequences_mean():
    result_N = sequence_log_ratio(torch.tensor(LOG_RATIOS).flatten(), sums_of(MASKS))
    assert nested(result_N, MASKS) == [pytest.approx([mean] * 4, abs=1e-7) for mean in MEANS]


def test_the_gradient_goes_through_the_sequence_ratio():
    """d/dx_t of a_i sum_t w_t s_i is a_i (sum of w) s_i / |y_i| for every trainable token, whatever its own weight."""
    log_ratio_N = torch.tensor(LOG_RATIOS).flatten().requires_grad_()
    weight_N = torch.tensor([[0.5, 0.0, 0.2, 0.3], [0.0, 0.1, 0.6, 0.0], [0.0] * 4]).flatten()
    adv_N = torch.tensor([[1.0] * 4, [2.0] * 4, [1.0] * 4]).flatten()
    ratio_N = sequence_log_ratio(log_ratio_N, sums_of(MASKS))
    term = clip_loss(ratio_N, adv_N, eps_clip=0.5, eps_clip_high=0.5, eps_clip_c=None)
    (term.loss_N * weight_N).sum().backward()
    first, second = -math.exp(0.1) / 3, -2 * 0.7 * math.exp(-0.3) / 2
    assert nested(log_ratio_N.grad, MASKS) == [
        pytest.approx([first, 0, first, first]),
        pytest.approx([0, second, second, 0]),
        [0] * 4,
    ]


def test_the_sequence_is_clipped_as_one():
    """Single ratios far out of the range, their mean within; and the other way round."""
    masks = [[1, 1, 1, 1], [1, 1, 1, 1]]
    log_ratio_N = torch.tensor([[1.0, -1.0, 0.5, -0.5], [0.15, 0.05, 0.1, 0.1]]).flatten().requires_grad_()
    ratio_N = sequence_log_ratio(log_ratio_N, sums_of(masks))
    term = clip_loss(ratio_N, torch.ones(8), eps_clip=3e-4, eps_clip_high=4e-4, eps_clip_c=None)
    term.loss_N.sum().backward()
    assert term.clipped_N.tolist() == [0] * 4 + [1] * 4
    torch.testing.assert_close(term.loss_N, -torch.tensor([1.0] * 4 + [1.0004] * 4))
    torch.testing.assert_close(log_ratio_N.grad, torch.tensor([-1.0] * 4 + [0.0] * 4))


@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
def test_a_ratio_of_e_to_the_200(log_ratio):
    log_ratio_N = torch.full((4,), log_ratio, requires_grad=True)
    ratio_N = sequence_log_ratio(log_ratio_N, sums_of([[1, 1, 1, 1]]))
    term = clip_loss(ratio_N, torch.tensor([1.0, 1.0, -1.0, -1.0]), eps_clip=0.2, eps_clip_high=0.2, eps_clip_c=None)
    term.loss_N.sum().backward()
    assert torch.isfinite(term.loss_N).all() and log_ratio_N.grad.tolist() == [0] * 4
