import math

import torch

from miles.training.losses import bounded_exp, sft_loss, weighted_sum


def test_weighted_sum_does_not_read_masked_entries():
    x_N = torch.tensor([1.0, math.nan, -math.inf, 4.0], requires_grad=True)
    total = weighted_sum(x_N, torch.tensor([0.5, 0.0, 0.0, 0.25]))
    total.backward()
    assert total.item() == 1.5 and x_N.grad.tolist() == [0.5, 0, 0, 0.25]
    assert weighted_sum(x_N, torch.zeros(4)).item() == 0


def test_bounded_exp():
    x = torch.tensor([-200.0, -1.0, 0.0, 19.0, 21.0, math.inf], requires_grad=True)
    y = bounded_exp(x)
    y.sum().backward()
    expected = [math.exp(v) for v in (-20, -1, 0, 19, 20, 20)]
    torch.testing.assert_close(y.tolist(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(x.grad.tolist(), [0.0, *expected[1:4], 0.0, 0.0], rtol=1e-6, atol=0)


def test_sft_loss():
    assert sft_loss(torch.tensor([-2.0])).item() == 2.0
