import math

import pytest
import torch

from miles.training.losses import KL_KINDS, kl_estimate, unbiased_kl


def test_two_samples_of_four_tokens():
    d_N = torch.tensor([[-1.0, 0.0, 0.5, 2.0], [0.1, -0.1, 3.0, -3.0]]).flatten()  # ref - log_probs
    log_probs_N = torch.full((8,), -2.0)
    d = d_N.tolist()
    k3 = [math.exp(x) - 1 - x for x in d]
    expected = {
        "k1": [-x for x in d],
        "k2": [x * x / 2 for x in d],
        "k3": k3,
        "low_var_kl": [min(x, 10.0) for x in k3],  # k3 at 3 is 16.1
    }
    assert max(k3) > 10
    for kind in KL_KINDS:
        values = kl_estimate(log_probs_N, log_probs_N + d_N, kind).tolist()
        assert values == pytest.approx(expected[kind], rel=1e-5, abs=1e-6), kind


@pytest.mark.parametrize("kind", ["k2", "k3", "low_var_kl"])
def test_never_negative_and_finite(kind):
    log_probs_N = torch.linspace(-300, 300, 601, requires_grad=True)
    kl_N = kl_estimate(log_probs_N, torch.zeros(601), kind)
    kl_N.sum().backward()
    assert (kl_N >= 0).all() and torch.isfinite(kl_N).all() and torch.isfinite(log_probs_N.grad).all()


class Enumerated:
    """A vocabulary of five: every token's probability under the model, an older model, and the reference."""

    def __init__(self):
        self.logits = torch.tensor([0.3, -0.2, 1.0, 0.4, -1.0], dtype=torch.float64, requires_grad=True)
        self.log_probs_N = torch.log_softmax(self.logits, 0)
        drift = torch.tensor([0.4, -0.3, 0.0, 0.5, -0.2], dtype=torch.float64)
        self.old_N = torch.log_softmax(self.logits.detach() + drift, 0)
        self.ref_N = torch.log_softmax(torch.tensor([0.0, 0.5, -0.5, 0.2, 0.1], dtype=torch.float64), 0)

    def gradient(self, value):
        return torch.autograd.grad(value, self.logits, retain_graph=True)[0]

    def exact(self):
        """The KL itself, and its gradient."""
        kl = (self.log_probs_N.exp() * (self.log_probs_N - self.ref_N)).sum()
        return kl, self.gradient(kl)


@pytest.mark.parametrize("kind, informative", [("k1", False), ("k2", True)])
def test_expected_gradient_of_an_estimate_as_a_loss(kind, informative):
    """Averaged over the model's own distribution, the gradient of k1 is zero and that of k2 is the KL's."""
    case = Enumerated()
    estimate = (case.log_probs_N.detach().exp() * kl_estimate(case.log_probs_N, case.ref_N, kind)).sum()
    expected = case.exact()[1] if informative else torch.zeros(5, dtype=torch.float64)
    torch.testing.assert_close(case.gradient(estimate), expected)


@pytest.mark.parametrize("kind", ["k1", "k3", "low_var_kl"])
def test_unbiased_kl_has_the_exact_value_and_gradient(kind):
    """Averaged over another distribution, the one that wrote the tokens."""
    case = Enumerated()
    kl_N = unbiased_kl(kl_estimate(case.log_probs_N, case.ref_N, kind), case.log_probs_N - case.old_N)
    estimate = (case.old_N.exp() * kl_N).sum()
    kl, gradient = case.exact()
    torch.testing.assert_close(estimate, kl)
    torch.testing.assert_close(case.gradient(estimate), gradient)
    assert gradient.abs().max() > 0.1


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_plain_estimate_is_biased_there(kind):
    case = Enumerated()
    estimate = (case.old_N.exp() * kl_estimate(case.log_probs_N, case.ref_N, kind)).sum()
    assert (case.gradient(estimate) - case.exact()[1]).abs().max() > 0.05


@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
def test_unbiased_at_a_ratio_of_e_to_the_200(log_ratio):
    log_ratio_N = torch.tensor([log_ratio], requires_grad=True)
    kl_N = unbiased_kl(torch.tensor([2.0]), log_ratio_N)
    kl_N.sum().backward()
    assert kl_N.item() == pytest.approx(2 * math.exp(math.copysign(20, log_ratio))) and log_ratio_N.grad.item() == 0


def test_unknown_kind_names_the_known_ones():
    with pytest.raises(ValueError, match="'k4'.*k1, k2, k3, low_var_kl"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
