import math

import pytest
import torch

from miles.training.corrections import extremes, mismatch_metrics
from tests.fast.training.micro_batches import nested, sums_of, whole_step

MASKS = [[1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]]


def test_samples_of_four_tokens():
    current = [[0.0, 0.0, math.log(2), math.log(3)], [0.7] * 4, [0.0] * 4]  # log-ratios to the denominator
    rollout_N = torch.full((12,), -2.0)
    trainer = [[0.0, 0.0, 0.0, math.log(4)], [0.1, -0.2, 0.3, -0.4], [0.0] * 4]  # log-ratios to the engine
    trainer_N = rollout_N + torch.tensor(trainer).flatten()
    metrics = mismatch_metrics(torch.tensor(current).flatten(), trainer_N, rollout_N, sums_of(MASKS))
    assert metrics.keys() == {"train_rollout_logprob_abs_diff", "train_rollout_kl", "ess_ratio", "rollout_ess_ratio"}
    # (1 + 2 + 3)^2 / (3 * (1 + 4 + 9)); equal weights; nothing to weigh.
    assert nested(metrics["ess_ratio"], MASKS) == [pytest.approx([x] * 4) for x in (36 / 42, 1.0, 0.0)]
    weights = [math.exp(x) for x in trainer[1]]
    second = sum(weights) ** 2 / (4 * sum(w * w for w in weights))
    assert nested(metrics["rollout_ess_ratio"], MASKS) == [pytest.approx([x] * 4) for x in (36 / 54, second, 0.0)]
    differences = sum(trainer, [])
    assert metrics["train_rollout_logprob_abs_diff"].tolist() == pytest.approx([abs(d) for d in differences], abs=1e-6)
    k3 = [math.exp(d) - 1 - d for d in differences]
    assert metrics["train_rollout_kl"].tolist() == pytest.approx(k3, abs=1e-6)


@pytest.mark.parametrize("log_ratio, share", [(200.0, 1 / 4), (-200.0, 3 / 4)])
def test_a_ratio_of_e_to_the_200(log_ratio, share):
    """One token that outweighs three others, or that weighs nothing beside them."""
    log_ratio_N = torch.tensor([0.0, 0.0, log_ratio, 0.0])
    metrics = mismatch_metrics(log_ratio_N, log_ratio_N, torch.zeros(4), sums_of([[1, 1, 1, 1]]))
    for name in ("ess_ratio", "rollout_ess_ratio"):
        assert metrics[name].tolist() == pytest.approx([share] * 4, rel=1e-6)
    assert all(torch.isfinite(x_N).all() for x_N in metrics.values())


def test_extremes():
    packed = whole_step(MASKS)
    x_N = torch.tensor([[0.5, 9.0, 2.0, 1.0], [0.4, 1.0, 3.0, 1.0], [math.nan, -5.0, 7.0, math.inf]]).flatten()
    assert {name: x.item() for name, x in extremes("a", x_N, packed).items()} == {
        "a_max": 3.0,
        "a_min": pytest.approx(0.4),
    }


def test_extremes_of_nothing():
    packed = whole_step([[0, 0]])
    result = extremes("a", torch.ones(2), packed)
    assert result["a_max"].item() == -math.inf and result["a_min"].item() == math.inf
