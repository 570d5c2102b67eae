import math

import pytest
import torch

from miles.training.losses import KL_KINDS, kl_estimate, policy_loss, sft_loss, weighted_sum


def loss_of(ratio, advantage, **options):
    log_probs_N = torch.tensor([math.log(ratio)], requires_grad=True)
    options = {"eps_clip": 0.2, "eps_clip_high": 0.28} | options
    result = policy_loss(log_probs_N, torch.zeros(1), torch.tensor([advantage]), **options)
    (gradient_N,) = torch.autograd.grad(result.loss_N.sum(), log_probs_N)
    return result.loss_N.item(), gradient_N.item(), result.clipfrac_N.item()


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
    ],
)
def test_clipped_loss_table(ratio, advantage, loss, gradient, clipped):
    assert loss_of(ratio, advantage) == pytest.approx((loss, gradient, clipped), abs=1e-6)


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    assert loss_of(10.0, -2.0, eps_clip_c=3.0)[:2] == pytest.approx((6.0, 0.0))
    assert loss_of(10.0, -2.0)[:2] == pytest.approx((20.0, 20.0), rel=1e-5)
    assert loss_of(10.0, 2.0, eps_clip_c=3.0) == pytest.approx(loss_of(10.0, 2.0))
    assert loss_of(2.0, -2.0, eps_clip_c=3.0) == pytest.approx(loss_of(2.0, -2.0))


@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_huge_log_ratio_stays_finite(log_ratio, advantage):
    log_probs_N = torch.tensor([log_ratio], requires_grad=True)
    result = policy_loss(log_probs_N, torch.zeros(1), torch.tensor([advantage]), eps_clip=0.2, eps_clip_high=0.2)
    result.loss_N.sum().backward()
    assert torch.isfinite(result.loss_N).all() and torch.isfinite(log_probs_N.grad).all()
    assert result.clipfrac_N.item() == (log_ratio * advantage > 0)


def test_ppo_kl_is_old_minus_current():
    result = policy_loss(torch.tensor([-1.0]), torch.tensor([-1.5]), torch.ones(1), eps_clip=0.2, eps_clip_high=0.2)
    assert result.ppo_kl_N.item() == -0.5


def test_kl_table():
    values = {kind: kl_estimate(torch.zeros(1), -torch.ones(1), kind).item() for kind in KL_KINDS}
    k3 = math.exp(-1) + 1 - 1
    assert values == pytest.approx({"k1": 1.0, "k2": 0.5, "k3": k3, "low_var_kl": k3})


@pytest.mark.parametrize("kind", ["k2", "k3", "low_var_kl"])
def test_kl_is_never_negative_and_finite(kind):
    log_probs_N = torch.linspace(-300, 300, 601, requires_grad=True)
    kl_N = kl_estimate(log_probs_N, torch.zeros(601), kind)
    kl_N.sum().backward()
    assert (kl_N >= 0).all() and torch.isfinite(kl_N).all() and torch.isfinite(log_probs_N.grad).all()


@pytest.mark.parametrize("kind, informative", [("k1", False), ("k2", True)])
def test_expected_gradient_of_kl_as_a_loss(kind, informative):
    """Averaged over the model's own distribution, the gradient of k1 is zero and that of k2 is the KL's."""
    logits = torch.tensor([0.3, -0.2, 1.0], requires_grad=True)
    ref_N = torch.log_softmax(torch.tensor([0.0, 0.5, -0.5]), 0)
    log_probs_N = torch.log_softmax(logits, 0)
    estimate = (log_probs_N.detach().exp() * kl_estimate(log_probs_N, ref_N, kind)).sum()
    (gradient,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    (exact,) = torch.autograd.grad((log_probs_N.exp() * (log_probs_N - ref_N)).sum(), logits)
    torch.testing.assert_close(gradient, exact if informative else torch.zeros(3), atol=1e-6, rtol=1e-5)


def test_unknown_kl_names_the_known_ones():
    with pytest.raises(ValueError, match="'k4'.*k1, k2, k3, low_var_kl"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_weighted_sum_does_not_read_masked_entries():
    x_N = torch.tensor([1.0, math.nan, -math.inf, 4.0], requires_grad=True)
    total = weighted_sum(x_N, torch.tensor([0.5, 0.0, 0.0, 0.25]))
    total.backward()
    assert total.item() == 1.5 and x_N.grad.tolist() == [0.5, 0, 0, 0.25]
    assert weighted_sum(x_N, torch.zeros(4)).item() == 0


def test_sft_loss():
    assert sft_loss(torch.tensor([-2.0])).item() == 2.0
