import pytest
import torch

from miles.training.corrections import RejectionSettings, rejected
from tests.fast.training.micro_batches import sums_of

MASKS = [[1, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]]
# Sequences: 2.4 and 0.2, of geometric means 1.34 and 0.58; one without a trainable token.
RATIOS = [[0.4, 1.0, 1.5, 4.0], [0.5, 0.8, 0.5, 1.0], [1.0] * 4]


def reject(level, low, high, veto=None, ratios=RATIOS):
    out_N, metrics = rejected(
        torch.tensor(ratios).log().flatten(), RejectionSettings(level, low, high, veto), sums_of(MASKS)
    )
    assert metrics["rs_fraction"].tolist() == out_N.tolist()
    assert metrics.keys() == {"rs_fraction", "rs_veto_fraction"}
    return [int(x) for x in out_N.tolist()], [int(x) for x in metrics["rs_veto_fraction"].tolist()]


@pytest.mark.parametrize(
    "level, low, high, out",
    [
        ("token", 0.45, 2.0, [1, 0, 0, 1] + [0] * 8),
        ("token", 0.0, 2.0, [0, 0, 0, 1] + [0] * 8),
        ("token", 0.6, 1.2, [1, 0, 1, 1] + [1, 0, 1, 0] + [0] * 4),
        ("sequence", 0.5, 2.0, [1] * 8 + [0] * 4),
        ("sequence", 0.0, 2.0, [1] * 4 + [0] * 8),
        ("sequence", 0.1, 2.5, [0] * 12),
        ("geometric", 0.5, 2.0, [0] * 12),
        ("geometric", 0.6, 2.0, [0] * 4 + [1] * 4 + [0] * 4),
        ("geometric", 0.5, 1.2, [1] * 4 + [0] * 8),
    ],
)
def test_two_samples_of_four_tokens(level, low, high, out):
    assert reject(level, low, high) == (out, [0] * 12)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_one_token_vetoes_its_sequence(level):
    everything = (0.0, 100.0)
    assert reject(level, *everything, veto=0.45) == ([1] * 4 + [0] * 8, [1] * 4 + [0] * 8)
    assert reject(level, *everything, veto=0.55) == ([1] * 8 + [0] * 4, [1] * 8 + [0] * 4)
    assert reject(level, *everything, veto=0.35) == ([0] * 12, [0] * 12)


def test_a_veto_adds_to_the_bounds():
    out, vetoed = reject("token", 0.0, 2.0, veto=0.45, ratios=[RATIOS[1], RATIOS[0], RATIOS[2]])
    # The masked token of RATIOS has moved: [0.5, (0.8), 0.5, 1.0] and [0.4, 1.0, 1.5, (4.0)].
    assert out == [0] * 4 + [1] * 4 + [0] * 4 and vetoed == out


def test_masked_tokens_do_not_veto():
    ratios = [[1.0, 1e-9, 1.0, 1.0], [1.0, 1.0, 1.0, 1e-9], [1e-9] * 4]
    assert reject("geometric", 0.5, 2.0, veto=0.1, ratios=ratios) == ([0] * 12, [0] * 12)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
def test_a_ratio_of_e_to_the_200(level, log_ratio):
    settings = RejectionSettings(level, 0.5, 1e30, None)
    out_N, _ = rejected(torch.full((12,), log_ratio), settings, sums_of([[1] * 4] * 3))
    assert out_N.all()
