import pytest
import torch

from miles.training.losses import value_loss


def test_two_samples_of_four_tokens():
    values_N = torch.tensor([1.0, 0.5, -0.5, 0.1, 1.0, 0.5, -0.5, 0.1], requires_grad=True)
    old_N = torch.zeros(8)
    returns_N = torch.tensor([1.0] * 4 + [-1.0] * 4)
    term = value_loss(values_N, old_N, returns_N, 0.2)
    term.loss_N.sum().backward()
    expected = [
        # Towards the return by more than 0.2: what the clipped value, at +-0.2, would lose; no gradient.
        (0.64, 0.0, 1),
        (0.64, 0.0, 1),
        (2.25, -3.0, 0),  # away from it: the free loss
        (0.81, -1.8, 0),
        (4.0, 4.0, 0),
        (2.25, 3.0, 0),
        (0.64, 0.0, 1),
        (1.21, 2.2, 0),
    ]
    result = zip(term.loss_N.tolist(), values_N.grad.tolist(), term.clipped_N.tolist(), strict=True)
    assert [pytest.approx(x, abs=1e-6) for x in expected] == list(result)


def test_clipped_around_the_old_value():
    term = value_loss(torch.tensor([5.0]), torch.tensor([4.0]), torch.tensor([5.0]), 0.25)
    assert term.loss_N.item() == pytest.approx(0.75**2)
