import math

import pytest
import torch

from miles.training.losses import clip_loss

CLIP_HIGHER = {"eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": None}


def loss_of(ratio, advantage, **options):
    """Loss, its gradient with respect to the log-probability, whether it was clipped, and the ratio."""
    log_ratio_N = torch.tensor([math.log(ratio)], requires_grad=True)
    term = clip_loss(log_ratio_N, torch.tensor([advantage]), **CLIP_HIGHER | options)
    (gradient_N,) = torch.autograd.grad(term.loss_N.sum(), log_ratio_N)
    return term.loss_N.item(), gradient_N.item(), term.clipped_N.item(), term.ratio_N.item()


@pytest.mark.parametrize(
    "ratio, advantage, loss, gradient, clipped",
    [
        (1.0, 1.0, -1.0, -1.0, 0),
        (1.1, 1.0, -1.1, -1.1, 0),
        (2.0, 1.0, -1.28, 0.0, 1),  # clip-higher: bounded by 1 + eps_clip_high, no gradient
        (0.5, 1.0, -0.5, -0.5, 0),
        (2.0, -1.0, 2.0, 2.0, 0),
        (0.5, -1.0, 0.8, 0.0, 1),
        (0.9, -1.0, 0.9, 0.9, 0),
        (2.0, 0.0, 0.0, 0.0, 0),
    ],
)
def test_table(ratio, advantage, loss, gradient, clipped):
    assert loss_of(ratio, advantage) == pytest.approx((loss, gradient, clipped, ratio), abs=1e-6)


def test_equal_bounds():
    assert loss_of(2.0, 1.0, eps_clip_high=0.2)[0] == pytest.approx(-1.2)


def test_two_samples_of_four_tokens():
    ratios = [[1.0, 1.3, 0.7, 1.2], [1.0, 1.3, 0.7, 9.0]]
    advantages = torch.tensor([[2.0] * 4, [-0.5] * 4])
    term = clip_loss(torch.tensor(ratios).log().flatten(), advantages.flatten(), **CLIP_HIGHER | {"eps_clip_c": 3.0})
    expected = [[-2.0, -2.56, -1.4, -2.4], [0.5, 0.65, 0.4, 1.5]]  # the last: 4.5 without the dual clip
    torch.testing.assert_close(term.loss_N.view(2, 4), torch.tensor(expected))
    assert term.clipped_N.view(2, 4).tolist() == [[0, 1, 0, 0], [0, 0, 1, 0]]
    torch.testing.assert_close(term.ratio_N.view(2, 4), torch.tensor(ratios))


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    assert loss_of(10.0, -2.0, eps_clip_c=3.0)[:2] == pytest.approx((6.0, 0.0))
    assert loss_of(10.0, -2.0)[:2] == pytest.approx((20.0, 20.0), rel=1e-5)
    assert loss_of(10.0, 2.0, eps_clip_c=3.0) == pytest.approx(loss_of(10.0, 2.0))
    assert loss_of(2.0, -2.0, eps_clip_c=3.0) == pytest.approx(loss_of(2.0, -2.0))


@pytest.mark.parametrize("eps_clip_c", [None, 3.0])
@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_of_e_to_the_200(log_ratio, advantage, eps_clip_c):
    log_ratio_N = torch.tensor([log_ratio], requires_grad=True)
    term = clip_loss(log_ratio_N, torch.tensor([advantage]), **CLIP_HIGHER | {"eps_clip_c": eps_clip_c})
    term.loss_N.sum().backward()
    worst = math.exp(20) if eps_clip_c is None else eps_clip_c
    expected = {(200, 1): -1.28, (200, -1): worst, (-200, 1): -math.exp(-20), (-200, -1): 0.8}
    assert term.loss_N.item() == pytest.approx(expected[log_ratio, advantage], rel=1e-5)
    assert log_ratio_N.grad.item() == 0
    assert term.clipped_N.item() == (log_ratio * advantage > 0)
