"""The loss of a step, against closed forms and under every way to cut the step into pieces."""

import math

import numpy as np
import pytest
import torch

from miles.training.batch import TrainBatch, offsets_of
from miles.training.losses import kl_estimate
from miles.training.packing import pack
from miles.training.policy import compute_policy_loss, compute_sft_loss
from miles.training.schedule import plan_rollout, shard
from miles.training.vocab_parallel import log_probs_and_entropy

OPTIONS = dict(
    eps_clip=0.2,
    eps_clip_high=0.28,
    eps_clip_c=None,
    entropy_coef=0.0,
    use_kl_loss=False,
    kl_loss_coef=0.0,
    kl_loss_type="k3",
    use_rollout_logprobs=False,
)
VOCAB = 11


def make_batch(masks, rewards, seed=0):
    """Prompts of two tokens, then one response token for each mask entry."""
    rng = np.random.default_rng(seed)
    response_lengths = np.array([len(mask) for mask in masks])
    rows = np.arange(len(masks))
    columns = {
        "tokens": rng.integers(0, VOCAB, size=response_lengths.sum() + 2 * len(masks)),
        "loss_masks": np.concatenate(masks).astype(np.int32),
        "rollout_log_probs": rng.normal(-2, 0.3, size=response_lengths.sum()).astype(np.float32),
        "rewards": np.array(rewards, dtype=np.float32),
        "truncated": np.zeros(len(rows), dtype=np.int64),
        "sample_indices": rows,
        "group_indices": rows // 2,
    }
    return TrainBatch(columns, offsets_of(response_lengths + 2), offsets_of(response_lengths))


def whole_step(batch, per_token_loss, **extra):
    plan = plan_rollout(
        batch,
        global_batch_size=len(batch),
        dp_size=1,
        micro_batch_size=len(batch),
        max_tokens=None,
        per_token_loss=per_token_loss,
    )
    part = shard(batch, plan, 0)
    return pack(part.batch, part.steps[0].micro_batches[0], 1, "cpu", **extra)


@pytest.mark.parametrize("per_token_loss", [False, True])
def test_two_samples_of_four_tokens_by_hand(per_token_loss):
    masks = [[1, 0, 1, 1], [0, 1, 0, 0]]
    log_ratio = torch.tensor([[0.0, 9.0, 0.1, 0.5], [9.0, -0.4, 9.0, 9.0]])
    batch = make_batch(masks, [1.0, -2.0])
    old_N = torch.full((8,), -1.5)
    packed = whole_step(batch, per_token_loss, old_log_probs=old_N)
    loss, metrics = compute_policy_loss(old_N + log_ratio.flatten(), torch.full((8,), 0.7), packed, **OPTIONS)
    tokens = [-1.0, -math.exp(0.1), -1.28, 2 * 0.8]  # clipped at 1.28 above and at 0.8 below
    mean = sum(tokens) / 4 if per_token_loss else (sum(tokens[:3]) / 3 + tokens[3]) / 2
    clipped = 2 / 4 if per_token_loss else (1 / 3 + 1) / 2
    ppo_kl = -(0.1 + 0.5 - 0.4) / 4 if per_token_loss else -((0.1 + 0.5) / 3 - 0.4) / 2
    assert loss.item() == pytest.approx(mean, rel=1e-5)
    assert metrics["train/loss"].item() == metrics["train/pg_loss"].item() == loss.item()
    assert metrics["train/pg_clipfrac"].item() == pytest.approx(clipped)
    assert metrics["train/ppo_kl"].item() == pytest.approx(ppo_kl, rel=1e-5)
    assert metrics["train/entropy_loss"].item() == pytest.approx(0.7)


def test_entropy_and_kl_terms():
    batch = make_batch([[1, 1, 0, 1], [1, 0, 0, 0]], [0.5, -0.5])
    old_N, ref_N = torch.randn(8) - 2, torch.randn(8) - 2
    ref_N[2] = -1e30  # masked: not read
    packed = whole_step(batch, True, old_log_probs=old_N, ref_log_probs=ref_N)
    options = OPTIONS | dict(entropy_coef=0.01, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k2")
    loss, metrics = compute_policy_loss(old_N, torch.arange(8.0), packed, **options)
    kept = torch.tensor([0, 1, 3, 4])
    kl = kl_estimate(old_N, ref_N, "k2")[kept].mean()
    torch.testing.assert_close(metrics["train/kl_loss"], kl)
    torch.testing.assert_close(metrics["train/entropy_loss"], torch.arange(8.0)[kept].mean())
    torch.testing.assert_close(loss, -torch.tensor([0.5, 0.5, 0.5, -0.5]).mean() - 0.01 * 2 + 0.1 * kl)


@pytest.mark.parametrize("use_rollout_logprobs", [False, True])
def test_distance_to_the_engine(use_rollout_logprobs):
    batch = make_batch([[1, 1], [1, 0]], [1.0, -1.0])
    rollout_N = torch.from_numpy(batch["rollout_log_probs"])
    trainer_N = rollout_N + torch.tensor([0.1, -0.2, 0.3, 5.0])
    packed = whole_step(batch, True, old_log_probs=trainer_N)
    # Without the trainer's old log-probabilities, the current ones are compared.
    options = OPTIONS | dict(use_rollout_logprobs=use_rollout_logprobs)
    _, metrics = compute_policy_loss(trainer_N, torch.zeros(4), packed, **options)
    assert metrics["train/train_rollout_logprob_abs_diff"].item() == pytest.approx(0.2, rel=1e-4)
    k3 = sum(math.exp(d) - 1 - d for d in (0.1, -0.2, 0.3)) / 3
    assert metrics["train/train_rollout_kl"].item() == pytest.approx(k3, rel=1e-3)
    ppo_kl = -sum((0.1, -0.2, 0.3)) / 3 if use_rollout_logprobs else 0
    assert metrics["train/ppo_kl"].item() == pytest.approx(ppo_kl, rel=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("masks", [[[1, 0, 1, 0], [0, 1, 1, 0]], [[0, 0, 0, 0], [0, 0, 0, 0]]])
def test_nothing_at_a_masked_place_is_read(bad, masks):
    batch = make_batch(masks, [1.0, -1.0])
    masked_N = batch["loss_masks"] == 0
    batch["rollout_log_probs"][masked_N] = bad
    columns = [torch.full((8,), -1.0) for _ in range(4)]
    for column in columns:
        column[torch.from_numpy(masked_N)] = bad
    log_probs_N, entropy_N, old_N, ref_N = columns
    log_probs_N.requires_grad_(), entropy_N.requires_grad_()
    packed = whole_step(batch, False, old_log_probs=old_N, ref_log_probs=ref_N)
    options = OPTIONS | dict(entropy_coef=0.1, use_kl_loss=True, kl_loss_coef=0.1, eps_clip_c=3.0)
    loss, metrics = compute_policy_loss(log_probs_N, entropy_N, packed, **options)
    sft, _ = compute_sft_loss(log_probs_N, packed)
    (loss + sft).backward()
    assert all(torch.isfinite(value) for value in [*metrics.values(), sft])
    for leaf in (log_probs_N, entropy_N):
        assert torch.isfinite(leaf.grad).all() and (leaf.grad[torch.from_numpy(masked_N)] == 0).all()
    if masked_N.all():
        assert loss.item() == sft.item() == 0


MASKS = [[1, 0, 1, 1, 1], [1], [0, 0, 0], [1, 1, 0, 1, 1, 1, 1], [0, 1], [1, 1, 1], [1] * 12, [0, 0, 0, 1]]
REWARDS = [1.0, -1.0, 0.7, 0.5, -0.5, 0.0, 2.0, -2.0]


def run_step(per_token_loss, supervised, **sizes):
    """Loss, metrics and gradient of a toy model (an embedding), added up over the micro-batches of all ranks."""
    batch = make_batch(MASKS, REWARDS)
    embedding = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)).requires_grad_()
    num_responses = batch.response_lengths.sum()
    plan = plan_rollout(batch, global_batch_size=8, per_token_loss=per_token_loss, **sizes)
    totals = {}
    for rank in range(sizes["dp_size"]):
        part = shard(batch, plan, rank)
        noise = torch.randn(num_responses, generator=torch.Generator().manual_seed(2)) * 0.3 - 2.5
        # The columns of a rank follow its rows, as those that a trainer computes do.
        local = [batch.response_offsets[i] + np.arange(batch.response_lengths[i]) for i in part.batch["sample_indices"]]
        noise = noise[torch.from_numpy(np.concatenate(local))]
        for rows in part.steps[0].micro_batches:
            packed = pack(part.batch, rows, 16, "cpu", old_log_probs=noise, ref_log_probs=noise + 0.1)
            logits_NV = embedding[packed.tokens_T[packed.logit_index_N]]
            log_probs_N, entropy_N = log_probs_and_entropy(
                logits_NV, torch.eye(VOCAB), packed.target_N, 0.9, entropy_grad=True
            )
            if supervised:
                loss, metrics = compute_sft_loss(log_probs_N, packed)
            else:
                options = OPTIONS | dict(entropy_coef=0.05, use_kl_loss=True, kl_loss_coef=0.1)
                loss, metrics = compute_policy_loss(log_probs_N, entropy_N, packed, **options)
            loss.backward()
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0) + value
    return totals, embedding.grad


@pytest.mark.parametrize("supervised", [False, True])
@pytest.mark.parametrize("per_token_loss", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        dict(dp_size=1, micro_batch_size=1, max_tokens=None),
        dict(dp_size=1, micro_batch_size=3, max_tokens=None),
        dict(dp_size=2, micro_batch_size=4, max_tokens=None),
        dict(dp_size=2, micro_batch_size=1, max_tokens=None),
        dict(dp_size=1, micro_batch_size=1, max_tokens=16),
        dict(dp_size=2, micro_batch_size=1, max_tokens=14),
        dict(dp_size=8, micro_batch_size=1, max_tokens=14),
    ],
)
def test_the_result_does_not_depend_on_how_a_step_is_cut(sizes, per_token_loss, supervised):
    metrics, gradient = run_step(per_token_loss, supervised, dp_size=1, micro_batch_size=8, max_tokens=None)
    cut_metrics, cut_gradient = run_step(per_token_loss, supervised, **sizes)
    assert metrics.keys() == cut_metrics.keys()
    for name in metrics:
        torch.testing.assert_close(cut_metrics[name], metrics[name], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(cut_gradient, gradient, atol=1e-6, rtol=1e-5)
    assert gradient.abs().max() > 0.01


def test_equal_rewards_give_no_gradient():
    batch = make_batch([[1, 1], [1, 1]], [0.0, 0.0])
    log_probs_N = torch.full((4,), -1.0, requires_grad=True)
    packed = whole_step(batch, False, old_log_probs=torch.full((4,), -1.2))
    loss, _ = compute_policy_loss(log_probs_N, torch.zeros(4), packed, **OPTIONS)
    loss.backward()
    assert loss.item() == 0 and log_probs_N.grad.tolist() == [0] * 4


def test_metrics_need_no_graph():
    batch = make_batch([[1, 1], [1, 1]], [1.0, -1.0])
    packed = whole_step(batch, False, old_log_probs=torch.zeros(4))
    _, metrics = compute_policy_loss(torch.zeros(4, requires_grad=True), torch.zeros(4), packed, **OPTIONS)
    assert not any(value.requires_grad for value in metrics.values())
