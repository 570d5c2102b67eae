"""From the configuration to the loss: its settings, and the user's own functions."""

import functools

import pytest
import torch

from miles.config import RunConfig
from miles.training.corrections import RejectionSettings, TisSettings
from miles.training.policy import PolicySettings, compute_policy_loss, compute_sft_loss, make_loss
from miles.training.sample_sums import SampleSums
from miles.utils.errors import UserError
from tests.fast.training.micro_batches import whole_step

MASKS = [[1, 0, 1, 1], [1, 1, 0, 1]]
MODULE = """
from miles.training.losses import weighted_sum

calls = []


def loss(config, log_probs_N, entropy_N, packed, sums):
    calls.append((config, log_probs_N, entropy_N, packed, sums))
    value = weighted_sum(-log_probs_N * packed.columns["advantages"], packed.weight_N)
    return value, {"train/loss": value, "train/entropy": weighted_sum(entropy_N, packed.metric_weight_N)}


def weights(config, old_N, rollout_N, packed, sums):
    calls.append((config, old_N, rollout_N, packed, sums))
    weight_N = (old_N - rollout_N) * config.gamma
    return weight_N, {"train/mine": weighted_sum(weight_N, packed.metric_weight_N)}


def undefined_at_masked_tokens(config, old_N, rollout_N, packed, sums):
    return old_N / old_N, {}


def float_as_metric(config, log_probs_N, entropy_N, packed, sums):
    return weighted_sum(log_probs_N, packed.weight_N), {"train/mine": 0.5}


def wrong(config, log_probs_N):
    pass
"""


def config_of(**changes):
    return RunConfig(**{"hf_checkpoint": "m", "rollout_batch_size": 8, "eps_clip_high": 0.3} | changes)


@pytest.fixture
def own(tmp_path, monkeypatch, request):
    """The name of a module of the user's."""
    name = f"own_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def columns():
    generator = torch.Generator().manual_seed(0)
    names = ("old_log_probs", "ref_log_probs", "advantages")
    return {name: torch.randn(8, generator=generator) for name in names}


def test_defaults():
    assert PolicySettings.of(config_of()) == PolicySettings(eps_clip_high=0.3)


def test_every_field():
    config = config_of(
        advantage_estimator="gspo",
        eps_clip=0.1,
        eps_clip_c=5.0,
        entropy_coef=0.01,
        use_kl_loss=True,
        kl_loss_coef=0.02,
        kl_loss_type="k3",
        use_unbiased_kl=True,
        skip_actor_forward_only=True,
        use_opsm=True,
        opsm_delta=0.4,
        use_tis=True,
        tis_level="geometric",
        tis_mode="mask",
        tis_clip=1.7,
        tis_clip_low=0.6,
        use_rs=True,
        rs_level="sequence",
        rs_upper_bound=3.0,
        rs_lower_bound=0.25,
        rs_veto_threshold=0.001,
    )
    assert PolicySettings.of(config) == PolicySettings(
        form="sequence_clip",
        eps_clip=0.1,
        eps_clip_high=0.3,
        eps_clip_c=5.0,
        entropy_coef=0.01,
        use_kl_loss=True,
        kl_loss_coef=0.02,
        kl_loss_type="k3",
        use_unbiased_kl=True,
        old="current",
        opsm_delta=0.4,
        tis=TisSettings("geometric", "mask", low=0.6, high=1.7),
        rejection=RejectionSettings("sequence", low=0.25, high=3.0, veto=0.001),
    )


@pytest.mark.parametrize(
    "estimator, form",
    [
        ("grpo", "clip"),
        ("cispo", "clipped_weight"),
        ("gspo", "sequence_clip"),
        ("ppo", "clip"),
        ("rloo", "clip"),
        ("reinforce_plus_plus", "clip"),
    ],
)
def test_form(estimator, form):
    assert PolicySettings.of(config_of(advantage_estimator=estimator)).form == form


def test_the_engine_as_denominator():
    assert PolicySettings.of(config_of(use_rollout_logprobs=True)).old == "engine"


@pytest.mark.parametrize("loss_type", ["policy_loss", "sft_loss"])
def test_make_loss(loss_type):
    config = config_of(loss_type=loss_type, use_kl_loss=True, kl_loss_coef=0.1)
    packed, log_probs_N, entropy_N = whole_step(MASKS, **columns()), torch.randn(8), torch.rand(8)
    loss, metrics = make_loss(config, None)(log_probs_N, entropy_N, packed)
    if loss_type == "sft_loss":
        expected = compute_sft_loss(log_probs_N, packed)
    else:
        expected = compute_policy_loss(log_probs_N, entropy_N, packed, PolicySettings.of(config), None)
    assert loss == expected[0] and metrics == expected[1]


def test_custom_loss(own):
    path = f"{own}.loss"
    config = config_of(loss_type="custom_loss", custom_loss_function_path=path)
    packed = whole_step(MASKS, **columns())
    log_probs_N, entropy_N = torch.randn(8, requires_grad=True), torch.rand(8)
    loss, metrics = make_loss(config, None)(log_probs_N, entropy_N, packed)
    loss.backward()
    mask_N, adv_N = torch.tensor(MASKS).flatten() > 0, packed.columns["advantages"]
    torch.testing.assert_close(log_probs_N.grad, torch.where(mask_N, -adv_N / 6, 0.0))
    torch.testing.assert_close(metrics["train/entropy"], entropy_N[mask_N].mean())
    given = __import__(own).calls[0]
    assert given[0] is config and given[3] is packed and isinstance(given[4], SampleSums)
    assert not given[1][~mask_N].any() and not given[2][~mask_N].any(), "nothing stands at masked places"
    # The distances to the engine are always there.
    _, policy_metrics = compute_policy_loss(log_probs_N, entropy_N, packed, PolicySettings(), None)
    names = {"train/train_rollout_kl", "train/train_rollout_logprob_abs_diff", "train/ess_ratio"}
    names |= {"train/rollout_ess_ratio", "train/train_rollout_ratio_max", "train/train_rollout_ratio_min"}
    assert metrics.keys() == names | {"train/loss", "train/entropy"}
    assert {name: metrics[name] for name in names} == {name: policy_metrics[name] for name in names}
    assert not any(value.requires_grad for value in metrics.values())


def test_a_custom_metric_that_is_no_tensor_is_named(own):
    config = config_of(loss_type="custom_loss", custom_loss_function_path=f"{own}.float_as_metric")
    with pytest.raises(UserError, match="metric train/mine is 0.5; a custom function must return scalar tensors"):
        make_loss(config, None)(torch.zeros(8), torch.zeros(8), whole_step(MASKS, **columns()))


def test_custom_importance_weights(own):
    config = config_of(custom_tis_function_path=f"{own}.weights", gamma=0.5, use_opsm=True, opsm_delta=0.0)
    settings = PolicySettings.of(config)
    assert isinstance(settings.custom_tis, functools.partial) and settings.tis is None
    packed = whole_step(MASKS, **columns())
    log_probs_N, entropy_N = torch.randn(8, requires_grad=True), torch.rand(8)
    _, metrics = compute_policy_loss(log_probs_N, entropy_N, packed, settings, None)
    assert "train/mine" in metrics and "train/tis" not in metrics
    (given_config, old_N, rollout_N, given_packed, sums) = __import__(own).calls[0]
    mask_N = torch.tensor(MASKS).flatten() > 0
    assert given_config is config and given_packed is packed and isinstance(sums, SampleSums)
    for given_N, name in ((old_N, "old_log_probs"), (rollout_N, "rollout_log_probs")):
        assert torch.equal(given_N, torch.where(mask_N, packed.columns[name], 0.0))
    weight_N = (old_N - rollout_N) * 0.5
    torch.testing.assert_close(metrics["train/mine"], weight_N[mask_N].mean())

    # Without any ratio out of the way, the loss is the weighted one.
    plain = PolicySettings(eps_clip=0.999, eps_clip_high=1e9)
    weighted = PolicySettings(eps_clip=0.999, eps_clip_high=1e9, custom_tis=settings.custom_tis)
    gradients = []
    for chosen in (plain, weighted):
        loss, _ = compute_policy_loss(log_probs_N, entropy_N, packed, chosen, None)
        gradients.append(torch.autograd.grad(loss, log_probs_N)[0])
    torch.testing.assert_close(gradients[1], gradients[0] * weight_N)


def test_custom_weights_of_masked_tokens_are_not_read(own):
    """0 / 0 there would reach every token of the sequence through GSPO's ratio."""
    custom_tis = PolicySettings.of(config_of(custom_tis_function_path=f"{own}.undefined_at_masked_tokens")).custom_tis
    packed, gradients = whole_step(MASKS, **columns()), []
    for settings in (PolicySettings(form="sequence_clip"), PolicySettings(form="sequence_clip", custom_tis=custom_tis)):
        log_probs_N = (packed.columns["old_log_probs"] + 0.01).requires_grad_()
        loss, _ = compute_policy_loss(log_probs_N, torch.zeros(8), packed, settings, None)
        loss.backward()
        gradients.append(log_probs_N.grad)
    assert torch.equal(*gradients) and gradients[0].any()


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            dict(loss_type="custom_loss", custom_loss_function_path="OWN.wrong"),
            "--custom-loss-function-path .*must take",
        ),
        (dict(loss_type="custom_loss", custom_loss_function_path="OWN.nothing"), "can't be imported"),
        (
            dict(custom_tis_function_path="OWN.wrong"),
            "--custom-tis-function-path .*\\(config, old_N, rollout_N, packed",
        ),
    ],
)
def test_a_bad_function_is_refused_before_the_first_step(own, changes, message):
    changes = {name: value.replace("OWN", own) for name, value in changes.items()}
    with pytest.raises(ValueError, match=message):
        make_loss(config_of(**changes), None)
