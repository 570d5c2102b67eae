"""Sums over samples; the same on one rank and split over two context-parallel ones, in value and gradient."""

import math
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

from miles.training.batch import TrainBatch
from miles.training.corrections import RejectionSettings, TisSettings
from miles.training.packing import pack
from miles.training.policy import PolicySettings, compute_policy_loss
from miles.training.sample_sums import SampleSums, sum_over
from tests.fast.training.micro_batches import make_batch, sums_of

MASKS = [[1, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]]
VALUES = [[1.0, math.nan, 2.0, 6.0], [math.inf, -1.0, 4.0, math.nan], [-math.inf] * 4]


def test_sum_mean_and_spread():
    sums, x_N = sums_of(MASKS), torch.tensor(VALUES).flatten()
    assert sums.count_S.tolist() == [3, 2, 0]
    assert sums.sum(x_N).tolist() == [9, 3, 0] and sums.mean(x_N).tolist() == [3, 1.5, 0]
    assert sums.spread(torch.tensor([7.0, 8.0, 9.0])).tolist() == [7] * 4 + [8] * 4 + [9] * 4
    assert sums.sum(torch.stack((x_N, 2 * x_N), dim=-1)).tolist() == [[9, 18], [3, 6], [0, 0]]
    assert sums.sum(x_N).dtype == torch.float64 and sums.spread(sums.mean(x_N)).dtype == torch.float32


def test_gradients():
    x_N = torch.tensor(VALUES).flatten().requires_grad_()
    sums = sums_of(MASKS)
    (sums.mean(x_N) * torch.tensor([3.0, 4.0, 5.0])).sum().backward()
    assert x_N.grad.tolist() == [1, 0, 1, 1, 0, 2, 2, 0, 0, 0, 0, 0]
    x_S = torch.ones(3, requires_grad=True)
    (sums.spread(x_S) * torch.arange(12.0)).sum().backward()
    assert x_S.grad.tolist() == [0 + 1 + 2 + 3, 4 + 5 + 6 + 7, 8 + 9 + 10 + 11]


def test_small_numbers_beside_large_ones():
    """In float32 the ones would be lost beside 2^25."""
    x_N = torch.tensor([2.0**25, 1.0, 1.0, 1.0, 1.0, -(2.0**25)])
    assert sums_of([[1] * 6]).sum(x_N).item() == 4


# The last sample has one token, which is one rank's; the one before it is all masked.
SPLIT_MASKS = [[1, 0, 1, 1, 1, 0, 1, 1, 1], [1, 1, 1, 0, 1], [0] * 6, [1]]
SETTINGS = {
    "gspo": PolicySettings(
        form="sequence_clip", use_kl_loss=True, kl_loss_coef=0.1, use_unbiased_kl=True, entropy_coef=0.1
    ),
    "opsm": PolicySettings(opsm_delta=0.01),
    "tis": PolicySettings(form="sequence_clip", tis=TisSettings("sequence", "truncate", 0.2, 3.0)),
    "icepop": PolicySettings(form="clipped_weight", tis=TisSettings("geometric", "mask", 0.8, 1.2)),
    "rejection": PolicySettings(rejection=RejectionSettings("geometric", 0.8, 1.2, 0.5)),
}


def split_batch() -> tuple[TrainBatch, torch.Tensor, dict[str, torch.Tensor]]:
    """A batch, the log-probabilities in training of all its response tokens, and the other columns."""
    batch, count = make_batch(SPLIT_MASKS), sum(map(len, SPLIT_MASKS))
    weights = np.array([0.1, 0.2, 0.3, 0.4], dtype=np.float32)
    batch = batch.with_columns(token_weights=weights, metric_weights=weights)
    noise = torch.randn(5, count, generator=torch.Generator().manual_seed(0)) * 0.3
    rollout_N = torch.from_numpy(batch["rollout_log_probs"])
    columns = dict(old_log_probs=rollout_N + noise[0], ref_log_probs=rollout_N + noise[1], advantages=noise[2] * 5)
    return batch, rollout_N + noise[0] + noise[3] * 0.5, columns | dict(entropy=noise[4])


def part(rank: int, size: int, all_reduce, settings: PolicySettings):
    """Loss, metrics and, flat over the whole batch, the gradient on one of `size` ranks."""
    batch, log_probs, columns = split_batch()
    log_probs.requires_grad_()
    packed = pack(batch, list(range(len(batch))), 1, "cpu", rank, size, **columns)
    mine = packed.response_index_N
    loss, metrics = compute_policy_loss(log_probs[mine], packed.columns["entropy"], packed, settings, all_reduce)
    loss.backward()
    return loss.item(), metrics, log_probs.grad, len(mine)


def test_split_over_two_ranks(run_ranks):
    run_ranks(__file__, 2)


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_split_settings_need_whole_samples(settings):
    """Two ranks that don't add up find another loss or gradient than one rank has."""
    loss, _, gradient, count = part(0, 1, None, SETTINGS[settings])
    parts = [part(rank, 2, None, SETTINGS[settings]) for rank in range(2)]
    assert [counts for *_, counts in parts] != [count, 0] and sum(counts for *_, counts in parts) == count
    off = max(abs(loss - sum(x[0] for x in parts)), (gradient - sum(x[2] for x in parts)).abs().max().item())
    assert off > 1e-3


if __name__ == "__main__":
    rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    alone = [dist.new_group([one]) for one in range(size)][rank]
    assert sum_over(alone) is None
    all_reduce = sum_over(dist.group.WORLD)

    batch, log_probs, columns = split_batch()
    packed = pack(batch, [0, 1, 2, 3], 1, "cpu", rank, size)
    sums, whole = SampleSums(packed, all_reduce), SampleSums(pack(batch, [0, 1, 2, 3], 1, "cpu"), None)
    mine, x_N = packed.response_index_N, log_probs.clone().requires_grad_()
    assert torch.equal(sums.count_S, whole.count_S) and 0 < len(mine) < len(log_probs)
    torch.testing.assert_close(sums.mean(log_probs[mine]), whole.mean(log_probs), rtol=1e-12, atol=0)
    # Each rank's part of a loss depends on all ranks' tokens.
    factor_N = columns["advantages"]
    (sums.spread(sums.mean(x_N[mine]).exp()) * factor_N[mine]).sum().backward()
    dist.all_reduce(x_N.grad)
    y_N = log_probs.clone().requires_grad_()
    (whole.spread(whole.mean(y_N).exp()) * factor_N).sum().backward()
    torch.testing.assert_close(x_N.grad, y_N.grad)

    for name, settings in SETTINGS.items():
        loss, metrics, gradient, _ = part(rank, size, all_reduce, settings)
        expected_loss, expected_metrics, expected_gradient, _ = part(0, 1, None, settings)
        total = torch.tensor(loss)
        dist.all_reduce(total)
        dist.all_reduce(gradient)
        torch.testing.assert_close(total.item(), expected_loss, rtol=1e-5, atol=1e-6, msg=name)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-6, msg=name)
        assert metrics.keys() == expected_metrics.keys()
        for metric, value in metrics.items():
            operation = {"_max": dist.ReduceOp.MAX, "_min": dist.ReduceOp.MIN}.get(metric[-4:], dist.ReduceOp.SUM)
            dist.all_reduce(value := value.clone(), op=operation)
            torch.testing.assert_close(value, expected_metrics[metric], rtol=1e-5, atol=1e-6, msg=f"{name} {metric}")
    dist.destroy_process_group()
