"""Columns and means of a rollout at two samples by four tokens, by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from miles.training.advantages import ESTIMATORS
from miles.training.batch import TrainBatch, offsets_of
from miles.training.rollout_columns import advantages_of, masked_means, trained_columns

NAN = torch.nan
# Tokens that are not trained on hold what must not be read.
MASKS = [1, 1, 0, 1, 0, 1, 1, 1]
OLD = torch.tensor([-1.0, -2.0, NAN, -3.0, -torch.inf, -1.0, -1.0, -2.0])
TEACHER = torch.tensor([-2.0, -2.0, NAN, -1.0, NAN, -1.5, -1.0, -4.0])
REWARDS = [1.0, -0.5]


def config(**changes):
    fields = {
        "advantage_estimator": "grpo",
        "kl_coef": 0.0,
        "kl_loss_type": "k1",
        "gamma": 1.0,
        "lambd": 1.0,
        "use_opd": False,
        "opd_kl_coef": 1.0,
        "normalize_advantages": False,
    }
    fields |= changes
    return SimpleNamespace(**fields, estimator=ESTIMATORS[fields["advantage_estimator"]])


@pytest.fixture
def batch():
    lengths = np.array([5, 5])
    columns = {
        "tokens": np.arange(10, dtype=np.int32),
        "loss_masks": np.array(MASKS, dtype=np.int8),
        "truncated": np.zeros(2, dtype=np.int64),
        "sample_indices": np.arange(2),
        "group_indices": np.zeros(2, dtype=np.int64),
        "rollout_ids": np.arange(2),
        "rewards": np.array(REWARDS, dtype=np.float32),
        "rollout_log_probs": (OLD - 0.5).numpy(),
        "teacher_log_probs": TEACHER.numpy(),
    }
    return TrainBatch(columns, offsets_of(lengths), offsets_of(np.array([4, 4])))


def alone(sums):
    """The all-reduce of one rank."""


def twice(sums):
    """The all-reduce of two ranks with the same tokens."""
    sums.mul_(2)


def test_grpo(batch):
    advantages, returns = advantages_of(config(), batch, {"old_log_probs": OLD})
    assert advantages.tolist() == [1.0, 1.0, 0.0, 1.0, 0.0, -0.5, -0.5, -0.5]
    assert returns is None
    assert list(trained_columns(config(), batch, {"old_log_probs": OLD}, alone)) == ["advantages"]


def test_kl_in_the_reward_is_that_of_the_policy_before_the_step(batch):
    kl = {"advantage_estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.1}
    reference = OLD - 1
    advantages, _ = advantages_of(config(**kl), batch, {"old_log_probs": OLD, "ref_log_probs": reference})
    torch.testing.assert_close(advantages, torch.tensor([0.9, 0.9, 0.0, 0.9, 0.0, -0.6, -0.6, -0.6]))
    # With --use-rollout-logprobs the engine's stand for it, which are half a nat lower.
    advantages, _ = advantages_of(config(**kl), batch, {"ref_log_probs": reference})
    torch.testing.assert_close(advantages, torch.tensor([0.95, 0.95, 0.0, 0.95, 0.0, -0.55, -0.55, -0.55]))


def test_the_critics_values_give_returns(batch):
    values = torch.tensor([0.5, 0.25, NAN, 0.0, NAN, 0.0, 0.5, -1.0])
    found = trained_columns(config(advantage_estimator="ppo"), batch, {"values": values}, alone)
    # gamma = lambda = 1: the return is the reward, the advantage what the value missed.
    torch.testing.assert_close(found["returns"][[0, 1, 3, 5, 6, 7]], torch.tensor([1.0] * 3 + [-0.5] * 3))
    torch.testing.assert_close(found["advantages"], torch.tensor([0.5, 0.75, 0.0, 1.0, 0.0, -0.5, -1.0, 0.5]))


def test_distillation(batch):
    opd = config(use_opd=True, opd_kl_coef=0.5)
    gap = torch.tensor([1.0, 0.0, 0.0, -2.0, 0.0, 0.5, 0.0, 2.0])
    wanted = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, -0.5, -0.5, -0.5]) - 0.5 * gap
    found = trained_columns(opd, batch, {"old_log_probs": OLD}, alone)
    torch.testing.assert_close(found["opd_reverse_kl"], gap)
    torch.testing.assert_close(found["advantages"], wanted)
    # A teacher of the trainer's own comes before the batch's.
    found = trained_columns(opd, batch, {"old_log_probs": OLD, "teacher_log_probs": OLD}, alone)
    assert not found["opd_reverse_kl"].any()
    # The engine's log-probabilities stand for the policy's.
    found = trained_columns(opd, batch, {}, alone)
    torch.testing.assert_close(found["opd_reverse_kl"], torch.where(torch.tensor(MASKS) > 0, gap - 0.5, 0.0))


def test_whitening_is_last(batch):
    opd = config(use_opd=True, normalize_advantages=True)
    found = trained_columns(opd, batch, {"old_log_probs": OLD}, twice)["advantages"]
    kept = found[torch.tensor(MASKS) > 0]
    assert kept.mean().item() == pytest.approx(0, abs=1e-6)
    assert kept.var(unbiased=False).item() == pytest.approx(1, abs=1e-6)
    assert found[2] == found[4] == 0


def test_means_are_of_trainable_tokens_on_all_ranks(batch):
    means = masked_means(batch, {"log_probs": OLD, "teacher": TEACHER}, twice)
    assert means == pytest.approx({"log_probs": -10 / 6, "teacher": -11.5 / 6})
    assert masked_means(batch, {}, alone) == {}


def test_a_rank_without_trainable_tokens_takes_part(batch):
    masked = batch.with_columns(loss_masks=np.zeros(8))
    seen = []

    def others(sums):
        seen.append(sums.clone())
        sums.add_(torch.ones_like(sums))

    assert masked_means(masked, {"log_probs": OLD}, others) == {"log_probs": 1.0}
    assert seen[0].tolist() == [0.0, 0.0]
    assert masked_means(masked, {"log_probs": OLD}, alone) == {}
    found = trained_columns(config(normalize_advantages=True), masked, {"old_log_probs": OLD}, others)
    assert not found["advantages"].any() and len(seen) == 3
