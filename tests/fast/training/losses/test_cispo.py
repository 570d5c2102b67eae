import math

import pytest
import torch

from miles.training.losses import cispo_loss


def test_two_samples_of_four_tokens():
    ratio_N = torch.tensor([0.5, 0.9, 1.2, 3.0] * 2)
    log_probs_N = torch.tensor([-0.1, -1.0, -2.0, -3.0] * 2, requires_grad=True)
    adv_N = torch.tensor([2.0] * 4 + [-1.0] * 4)
    log_ratio_N = log_probs_N - (log_probs_N.detach() - ratio_N.log())
    term = cispo_loss(log_probs_N, log_ratio_N, adv_N, eps_clip=0.2, eps_clip_high=0.28)
    term.loss_N.sum().backward()
    weights = torch.tensor([0.8, 0.9, 1.2, 1.28] * 2)
    torch.testing.assert_close(term.loss_N, -weights * adv_N * log_probs_N)
    # The clip stops the gradient of the ratio, not that of the token: -weight A, for clipped tokens as well.
    torch.testing.assert_close(log_probs_N.grad, -weights * adv_N)
    assert term.clipped_N.tolist() == [1, 0, 0, 1] * 2
    torch.testing.assert_close(term.ratio_N, ratio_N)


@pytest.mark.parametrize("log_ratio, weight", [(200.0, 1.2), (-200.0, 0.8)])
def test_a_ratio_of_e_to_the_200(log_ratio, weight):
    log_probs_N = torch.tensor([-1.0], requires_grad=True)
    term = cispo_loss(log_probs_N, torch.tensor([log_ratio]), torch.tensor([-3.0]), eps_clip=0.2, eps_clip_high=0.2)
    term.loss_N.sum().backward()
    assert term.loss_N.item() == pytest.approx(-3 * weight) and log_probs_N.grad.item() == pytest.approx(3 * weight)
    assert math.isfinite(term.ratio_N.item()) and term.clipped_N.item() == 1
