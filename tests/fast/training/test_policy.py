"""The loss of a step, against plain Python and under every way to cut the step into pieces."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from miles.training.corrections import RejectionSettings, TisSettings
from miles.training.packing import pack
from miles.training.policy import PolicySettings, compute_policy_loss, compute_sft_loss, compute_value_loss
from miles.training.schedule import plan_rollout, shard
from miles.training.vocab_parallel import log_probs_and_entropy
from tests.fast.training.micro_batches import VOCAB, make_batch, rows_of, whole_step
from tests.fast.training.plain_policy import PlainSample, plain_policy_loss

# Two samples by four tokens, with holes. Current minus old log-probabilities reach over both clipping bounds.
MASKS = [[1, 0, 1, 1], [1, 1, 0, 1]]
OLD = [[-1.5, -9.0, -2.0, -0.5], [-1.0, -3.0, -9.0, -2.5]]
CURRENT = [[-1.4, -9.0, -2.4, -0.1], [-1.6, -2.8, -9.0, -2.3]]
ROLLOUT = [[-1.2, -9.0, -2.1, -1.3], [-1.5, -3.3, -9.0, -2.6]]
REF = [[-1.0, -9.0, -2.3, -0.7], [-1.1, -2.5, -9.0, -2.0]]
ENTROPY = [[0.5, 9.0, 1.0, 1.5], [2.0, 0.1, 9.0, 0.2]]
ADVANTAGES = [[1.0, 9.0, -0.5, 2.0], [-1.0, -2.0, 9.0, 0.5]]

TIS = TisSettings("token", "truncate", 0.75, 1.3)
REJECTION = RejectionSettings("token", 0.5, 2.0, 0.6)
CORRECTIONS = {
    "none": {},
    "opsm": dict(opsm_delta=0.01),
    **{
        f"tis-{level}-{mode}": dict(tis=TisSettings(level, mode, 0.75, 1.3))
        for level, mode in itertools.product(("token", "sequence", "geometric"), ("truncate", "mask"))
    },
    "rejection-token": dict(rejection=RejectionSettings("token", 0.75, 2.0, None)),
    "rejection-sequence": dict(rejection=RejectionSettings("sequence", 2.0, 9.0, None)),
    "rejection-geometric": dict(rejection=RejectionSettings("geometric", 0.75, 1.3, None)),
    "veto": dict(rejection=RejectionSettings("token", 0.0, 1.5, 0.745)),
    "all": dict(opsm_delta=0.01, tis=TIS, rejection=REJECTION),
}
EXTREMES = (
    "train/ppo_ratio_max",
    "train/ppo_ratio_min",
    "train/train_rollout_ratio_max",
    "train/train_rollout_ratio_min",
)


def policy_loss(packed, settings, current=CURRENT, entropy=ENTROPY):
    """Loss, metrics as floats, and the gradient of the current log-probabilities, [2, 4]."""
    current = torch.tensor(current, requires_grad=True)
    loss, metrics = compute_policy_loss(current.flatten(), torch.tensor(entropy).flatten(), packed, settings, None)
    loss.backward()
    return loss.item(), {name: value.item() for name, value in metrics.items()}, current.grad


def two_by_four(masks=MASKS, mean="sample", **options):
    columns = dict(old_log_probs=OLD, ref_log_probs=REF, advantages=ADVANTAGES)
    packed = whole_step(masks, per_token_loss=mean == "token", **columns, **options)
    packed.columns["rollout_log_probs"] = torch.tensor(ROLLOUT).flatten()
    return packed


def plain(settings, mean="sample", current=CURRENT):
    samples = [PlainSample(*x) for x in zip(MASKS, current, OLD, ROLLOUT, REF, ENTROPY, ADVANTAGES, strict=True)]
    return plain_policy_loss(samples, settings, mean)


@pytest.mark.parametrize("mean", ["sample", "token"])
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("form", ["clip", "sequence_clip", "clipped_weight"])
def test_two_samples_of_four_tokens(form, correction, mean):
    settings = PolicySettings(
        form=form,
        eps_clip=0.05 if form == "sequence_clip" else 0.2,
        eps_clip_high=0.08 if form == "sequence_clip" else 0.28,
        entropy_coef=0.01,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        kl_loss_type="k3",
        use_unbiased_kl=correction == "all",
        **CORRECTIONS[correction],
    )
    loss, metrics, _ = policy_loss(two_by_four(mean=mean), settings)
    expected = {f"train/{name}": value for name, value in plain(settings, mean).items()}
    assert loss == pytest.approx(expected["train/loss"], rel=1e-5, abs=1e-6)
    means = {name: value for name, value in metrics.items() if name not in EXTREMES}
    assert means == pytest.approx(expected, rel=1e-5, abs=1e-6)
    differences = [math.exp(a - b) for a, b, m in zip(*map(sum, (OLD, ROLLOUT, MASKS), [[]] * 3), strict=True) if m]
    assert metrics["train/train_rollout_ratio_max"] == pytest.approx(max(differences))
    assert metrics["train/train_rollout_ratio_min"] == pytest.approx(min(differences))


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("form", ["clip", "sequence_clip"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_gradient_against_finite_differences(form, correction, unbiased):
    """Of the plain loss in float64. cispo's is none of its value's; see test_cispo.py."""
    kl = dict(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k3", use_unbiased_kl=unbiased)
    settings = PolicySettings(form=form, eps_clip_high=0.28, **kl, **CORRECTIONS[correction])
    _, _, gradient = policy_loss(two_by_four(), settings)
    step, expected = 1e-6, torch.zeros(2, 4)
    for i, t in itertools.product(range(2), range(4)):
        values = []
        for sign in (1, -1):
            current = [list(row) for row in CURRENT]
            current[i][t] += sign * step
            values.append(plain(settings, current=current)["loss"])
        expected[i, t] = (values[0] - values[1]) / (2 * step)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_the_corrections_above_do_something():
    """Each gives another loss than the others."""
    losses = {name: plain(PolicySettings(**options))["loss"] for name, options in CORRECTIONS.items()}
    for a, b in itertools.combinations(losses, 2):
        assert abs(losses[a] - losses[b]) > 1e-3, (a, b)


@pytest.mark.parametrize("old", ["trainer", "engine", "current"])
def test_the_denominator_of_the_ratio(old):
    settings = PolicySettings(old=old, use_kl_loss=True, kl_loss_coef=0.1, use_unbiased_kl=True)
    packed = two_by_four()
    if old != "trainer":
        del packed.columns["old_log_probs"]
    loss, metrics, gradient = policy_loss(packed, settings)
    expected = {f"train/{name}": value for name, value in plain(settings).items()}
    assert loss == pytest.approx(expected["train/loss"], rel=1e-5)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)
    pairs = {"trainer": OLD, "engine": ROLLOUT, "current": CURRENT}[old]
    ratios = [math.exp(a - b) for a, b, m in zip(*map(sum, (CURRENT, pairs, MASKS), [[]] * 3), strict=True) if m]
    assert metrics["train/ppo_ratio_max"] == pytest.approx(max(ratios))
    assert metrics["train/ppo_ratio_min"] == pytest.approx(min(ratios))
    assert (gradient != 0).sum() > 1  # with "current" too, though the ratio is 1


def test_current_log_probs_as_the_denominator_are_the_policy_gradient():
    _, _, gradient = policy_loss(two_by_four(mean="token"), PolicySettings(old="current"))
    torch.testing.assert_close(gradient, -torch.tensor(ADVANTAGES) * torch.tensor(MASKS) / 6)


def test_importance_weights_use_the_current_log_probs_without_old_ones():
    settings = PolicySettings(old="current", tis=TIS)
    loss, _, _ = policy_loss(two_by_four(), settings)
    assert loss == pytest.approx(plain(settings)["loss"], rel=1e-5)


@pytest.mark.parametrize(
    "correction", ["opsm", "tis-token-mask", "rejection-token", "rejection-geometric", "veto", "all"]
)
def test_corrections_are_constant_factors(correction):
    """The corrected gradient is the uncorrected one times a weight: for what is left out it is 0, and only there.

    The divisor counts what is left out: the others' gradients do not grow.
    """
    entropy_and_kl = dict(entropy_coef=0.01, use_kl_loss=True, kl_loss_coef=0.0)
    _, _, free = policy_loss(two_by_four(), PolicySettings(eps_clip=0.9, eps_clip_high=9.0))
    settings = PolicySettings(eps_clip=0.9, eps_clip_high=9.0, **CORRECTIONS[correction])
    _, metrics, corrected = policy_loss(two_by_four(), settings)
    _, with_others, again = policy_loss(two_by_four(), dataclasses.replace(settings, **entropy_and_kl))
    torch.testing.assert_close(again, corrected)
    factor = torch.where(free == 0, 0.0, corrected / free)
    weights = []
    for sample in [PlainSample(*x) for x in zip(MASKS, CURRENT, OLD, ROLLOUT, REF, ENTROPY, ADVANTAGES, strict=True)]:
        plain_free = sample.terms(PolicySettings(eps_clip=0.9, eps_clip_high=9.0))
        weights += [a["pg_loss"] / b["pg_loss"] for a, b in zip(sample.terms(settings), plain_free, strict=True)]
    torch.testing.assert_close(factor[torch.tensor(MASKS) > 0], torch.tensor(weights), rtol=1e-4, atol=1e-6)
    assert 0 in weights and any(weights), "some are left out, some are not"
    # Entropy and divergence are means over all trainable tokens, left out or not.
    everything = plain(PolicySettings(use_kl_loss=True))
    for name in ("entropy_loss", "kl_loss", "ppo_kl", "ess_ratio"):
        assert with_others[f"train/{name}"] == pytest.approx(everything[name], rel=1e-5), name
    assert metrics["train/pg_clipfrac"] == plain(settings)["pg_clipfrac"]


def test_gspo_has_one_gradient_a_sequence():
    masks, advantages = [[1, 0, 1, 1], [1, 1, 0, 1]], [[1.0] * 4, [-2.0] * 4]
    packed = two_by_four(masks)
    packed.columns["advantages"] = torch.tensor(advantages).flatten()
    settings = PolicySettings(form="sequence_clip", eps_clip=0.5, eps_clip_high=0.5)
    _, metrics, gradient = policy_loss(packed, settings)
    first, second = math.exp((0.1 - 0.4 + 0.4) / 3), math.exp((-0.6 + 0.2 + 0.2) / 3)
    expected = [[-first / 6, 0, -first / 6, -first / 6], [2 * second / 6, 2 * second / 6, 0, 2 * second / 6]]
    torch.testing.assert_close(gradient, torch.tensor(expected))
    assert metrics["train/ppo_ratio_max"] == pytest.approx(first)
    assert metrics["train/ppo_ratio_min"] == pytest.approx(second)


def test_constant_length_divides_the_loss_but_no_metric():
    """10 tokens a sample: two samples of three tokens each have 0.3 times the weight."""
    settings = PolicySettings(entropy_coef=0.01, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k2", tis=TIS)
    loss, metrics, gradient = policy_loss(two_by_four(constant_length=10), settings)
    mean_loss, mean_metrics, mean_gradient = policy_loss(two_by_four(), settings)
    assert loss == pytest.approx(0.3 * mean_loss, rel=1e-4) and mean_loss != 0
    torch.testing.assert_close(gradient, 0.3 * mean_gradient)
    scaled = {name: 0.3 * mean_metrics[name] for name in ("train/loss", "train/pg_loss")}
    assert metrics == pytest.approx(mean_metrics | scaled, rel=1e-4)


BAD = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("masks", [[[1, 0, 1, 0], [0, 1, 1, 0]], [[0, 0, 0, 0], [1, 1, 1, 0]], [[0] * 4, [0] * 4]])
@pytest.mark.parametrize("form", ["clip", "sequence_clip", "clipped_weight"])
def test_nothing_at_a_masked_place_is_read(form, masks, bad):
    """Loss, metrics and gradients are those of any other numbers there, to the bit."""
    settings = PolicySettings(
        form=form,
        eps_clip_c=None if form == "clipped_weight" else 3.0,
        entropy_coef=0.1,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        kl_loss_type="k3",
        use_unbiased_kl=True,
        opsm_delta=0.0,
        tis=TisSettings("sequence", "truncate", 0.0, 2.0),
        rejection=RejectionSettings("geometric", 0.5, 2.0, 0.1),
    )
    masked = torch.tensor(masks) == 0
    names = ("old_log_probs", "ref_log_probs", "advantages", "rollout_log_probs", "values", "returns")
    good = dict(zip(names, map(torch.tensor, (OLD, REF, ADVANTAGES, ROLLOUT, OLD, REF)), strict=True))

    def results(replaced):
        columns = {name: torch.where(masked, replaced, values) for name, values in good.items()}
        packed = whole_step(masks, **columns)
        packed.columns["rollout_log_probs"] = columns["rollout_log_probs"].flatten()
        current, entropy, values = (
            torch.where(masked, replaced, torch.tensor(x)).requires_grad_() for x in (CURRENT, ENTROPY, OLD)
        )
        loss, metrics = compute_policy_loss(current.flatten(), entropy.flatten(), packed, settings, None)
        sft, sft_metrics = compute_sft_loss(current.flatten(), packed)
        value, value_metrics = compute_value_loss(values.flatten(), packed, 0.2)
        (loss + sft + value).backward()
        scalars = metrics | value_metrics | {"sft": sft_metrics["train/loss"]}
        return {name: x.item() for name, x in scalars.items()}, [x.grad for x in (current, entropy, values)]

    scalars, gradients = results(bad)
    expected_scalars, expected_gradients = results(0.5)
    assert scalars == expected_scalars
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        assert torch.equal(gradient, expected) and (gradient[masked] == 0).all()
    extremes = {name: scalars.pop(name) for name in EXTREMES}
    assert all(math.isfinite(x) for x in scalars.values())
    if masked.all():
        assert set(scalars.values()) == {0.0}
        assert extremes == {name: math.inf if name.endswith("min") else -math.inf for name in EXTREMES}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("form", ["clip", "sequence_clip", "clipped_weight"])
def test_ratios_of_e_to_the_200(form, sign):
    packed = two_by_four()
    packed.columns["rollout_log_probs"] = torch.tensor(OLD).flatten() + 200 * sign
    settings = PolicySettings(form=form, opsm_delta=0.1, tis=TIS, rejection=RejectionSettings("token", 0.0, 1e9, None))
    current = [[x + 200 * sign for x in row] for row in OLD]
    _, metrics, gradient = policy_loss(packed, settings, current=current)
    assert all(map(math.isfinite, metrics.values())) and torch.isfinite(gradient).all()
    ratio = math.exp(20 * sign)
    for name in ("train/ppo_ratio_max", "train/ppo_ratio_min", "train/ois"):
        assert metrics[name] == pytest.approx(ratio, rel=1e-5)
    assert metrics["train/tis"] == pytest.approx(1 / ratio, rel=1e-5)
    assert metrics["train/train_rollout_ratio_max"] == pytest.approx(1 / ratio, rel=1e-5)
    assert metrics["train/ess_ratio"] == metrics["train/rollout_ess_ratio"] == pytest.approx(1)


def test_equal_rewards_give_no_gradient():
    packed = two_by_four()
    packed.columns["advantages"] = torch.zeros(8)
    loss, _, gradient = policy_loss(packed, PolicySettings())
    assert loss == 0 and not gradient.any()


def test_metrics_need_no_graph_and_name_what_was_asked_for():
    always = {"loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "ess_ratio", "rollout_ess_ratio"}
    always |= {"train_rollout_kl", "train_rollout_logprob_abs_diff"} | {
        name.removeprefix("train/") for name in EXTREMES
    }
    options = {
        (): PolicySettings(),
        ("kl_loss",): PolicySettings(use_kl_loss=True),
        ("opsm_clipfrac",): PolicySettings(opsm_delta=0.0),
        ("tis", "tis_clipfrac", "tis_abs", "ois"): PolicySettings(tis=TIS),
        ("rs_fraction", "rs_veto_fraction"): PolicySettings(rejection=REJECTION),
    }
    current = torch.tensor(CURRENT).flatten().requires_grad_()
    entropy = torch.tensor(ENTROPY).flatten().requires_grad_()
    for added, settings in options.items():
        _, metrics = compute_policy_loss(current, entropy, two_by_four(), settings, None)
        assert metrics.keys() == {f"train/{name}" for name in always | set(added)}
        assert not any(value.requires_grad for value in metrics.values())


def test_value_loss_of_two_samples_of_four_tokens():
    values = torch.tensor([[1.0, 5.0, 0.5, 0.1], [1.0, 5.0, -0.5, 0.1]], requires_grad=True)
    masks = [[1, 0, 1, 0], [0, 0, 1, 0]]
    packed = whole_step(masks, values=[[0.0] * 4] * 2, returns=[[1.0] * 4, [-1.0] * 4])
    loss, metrics = compute_value_loss(values.flatten(), packed, 0.2)
    loss.backward()
    assert loss.item() == pytest.approx((0.64 + 0.64) / 2 / 2 + 0.64 / 2)
    assert metrics.keys() == {"train/value_loss", "train/value_clipfrac"}
    assert metrics["train/value_loss"].item() == loss.item() and not metrics["train/value_loss"].requires_grad
    assert metrics["train/value_clipfrac"].item() == 1 and not values.grad.any()
    loss, metrics = compute_value_loss(values.flatten(), packed, 2.0)
    loss.backward()
    assert loss.item() == pytest.approx((0.0 + 0.25) / 2 / 2 + 0.25 / 2)
    assert metrics["train/value_clipfrac"].item() == 0
    torch.testing.assert_close(values.grad, torch.tensor([[0, 0, -0.25, 0], [0, 0, 0.5, 0]]))


def test_sft_loss():
    packed = whole_step([[1, 0, 1, 1], [0, 0, 1, 0]])
    loss, metrics = compute_sft_loss(torch.tensor([-1.0, 9.0, -2.0, -3.0, 9.0, 9.0, -4.0, 9.0]), packed)
    assert loss.item() == metrics["train/loss"].item() == pytest.approx((2 + 4) / 2)


CUT_MASKS = [[1, 0, 1, 1, 1], [1], [0, 0, 0], [1, 1, 0, 1, 1, 1, 1], [0, 1], [1, 1, 1], [1] * 12, [0, 0, 0, 1]]
SETTINGS = {
    "clip": PolicySettings(eps_clip_high=0.28, entropy_coef=0.05, use_kl_loss=True, kl_loss_coef=0.1),
    "gspo": PolicySettings(form="sequence_clip", opsm_delta=0.01, tis=TisSettings("sequence", "mask", 0.1, 3.0)),
    "cispo": PolicySettings(form="clipped_weight", rejection=RejectionSettings("geometric", 0.5, 2.0, 0.2)),
    "supervised": None,
}


def run_step(settings, per_token_loss, **sizes):
    """Loss, metrics and gradient of a toy model (an embedding), brought together from all micro-batches and ranks."""
    batch = make_batch(CUT_MASKS)
    embedding = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)).requires_grad_()
    num_responses = batch.response_lengths.sum()
    plan = plan_rollout(rows_of(batch), global_batch_size=8, per_token_loss=per_token_loss, **sizes)
    totals = {}
    for rank in range(sizes["dp_size"]):
        part = shard(rows_of(batch), plan, rank)
        noise = torch.randn(2, num_responses, generator=torch.Generator().manual_seed(2)) * 0.3
        # The columns of a rank follow its rows, as those that a trainer computes do.
        local = [batch.response_offsets[i] + np.arange(batch.response_lengths[i]) for i in part.batch["sample_indices"]]
        noise, adv_N = noise[:, torch.from_numpy(np.concatenate(local))] - torch.tensor([[2.5], [0.0]])
        columns = dict(old_log_probs=noise, ref_log_probs=noise + 0.1, advantages=adv_N)
        for rows in part.steps[0].micro_batches:
            packed = pack(part.batch, rows, 16, "cpu", **columns)
            logits_NV = embedding[packed.tokens_T[packed.logit_index_N]]
            log_probs_N, entropy_N = log_probs_and_entropy(
                logits_NV, torch.eye(VOCAB), packed.target_N, 0.9, entropy_grad=True
            )
            if settings is None:
                loss, metrics = compute_sft_loss(log_probs_N, packed)
            else:
                loss, metrics = compute_policy_loss(log_probs_N, entropy_N, packed, settings, None)
            loss.backward()
            for name, value in metrics.items():
                combine = {"_max": torch.maximum, "_min": torch.minimum}.get(name[-4:], torch.add)
                totals[name] = combine(totals[name], value) if name in totals else value
    return totals, embedding.grad


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("per_token_loss", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        dict(dp_size=1, micro_batch_size=1, max_tokens=None),
        dict(dp_size=1, micro_batch_size=3, max_tokens=None),
        dict(dp_size=2, micro_batch_size=4, max_tokens=None),
        dict(dp_size=2, micro_batch_size=1, max_tokens=None),
        dict(dp_size=3, micro_batch_size=2, max_tokens=None),
        dict(dp_size=1, micro_batch_size=1, max_tokens=16),
        dict(dp_size=2, micro_batch_size=1, max_tokens=14),
        dict(dp_size=8, micro_batch_size=1, max_tokens=14),
    ],
)
def test_the_result_does_not_depend_on_how_a_step_is_cut(sizes, per_token_loss, settings):
    settings = SETTINGS[settings]
    metrics, gradient = run_step(settings, per_token_loss, dp_size=1, micro_batch_size=8, max_tokens=None)
    cut_metrics, cut_gradient = run_step(settings, per_token_loss, **sizes)
    assert metrics.keys() == cut_metrics.keys()
    for name in metrics:
        torch.testing.assert_close(cut_metrics[name], metrics[name], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(cut_gradient, gradient, atol=1e-6, rtol=1e-5)
    assert gradient.abs().max() > 0.005
