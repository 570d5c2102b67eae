"""The same numbers through other public implementations, TRL's and verl's: equal, or a sentence why they are not.

Inputs are random and wide: ratios far out of every clipping range, masks with holes, groups out of order.
Shapes: S samples, T response tokens, padded; what stands at masked tokens is arbitrary, but finite, since both packages
multiply it with the mask. `make setup` installs both (requirements-peers.txt).
"""

import math

import numpy as np
import pytest
import torch

from miles.training.advantages import ESTIMATORS, AdvantageInputs
from miles.training.advantages.estimator import compute_advantages
from miles.training.advantages.groups import shape_rewards
from miles.training.advantages.responses import Responses
from miles.training.advantages.whitening import whiten
from miles.training.corrections import RejectionSettings, TisSettings, importance_weights, rejected
from miles.training.losses import kl_estimate, value_loss, weighted_sum
from miles.training.policy import PolicySettings, compute_policy_loss
from miles.training.sample_sums import SampleSums
from tests.fast.training.micro_batches import whole_step
from tests.fast.training.peers import core_algos, rollout_corr_helper, trl_loss, verl_loss

S, T = 8, 7
GROUPS = [3, 1, 3, 1, 3, 1, 1, 3]
BOUNDS = {"eps_clip": 0.2, "eps_clip_high": 0.28}
VERL_BOUNDS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
TRL_BOUNDS = {"epsilon_low": 0.2, "epsilon_high": 0.28}
GSPO = {"form": "sequence_clip", "eps_clip": 0.03, "eps_clip_high": 0.04}
NEVER = 1e9  # verl's dual clip can't be turned off


def make_mask(empty: bool) -> torch.Tensor:
    """bool [S, T]: whole, cut off, with holes; with `empty` one sample has no trainable token."""
    mask = torch.ones(S, T, dtype=torch.bool)
    mask[1, 4:] = mask[2, :2] = mask[3, 2:5] = mask[5, 1:] = mask[6, [0, 3, 6]] = False
    mask[4] = not empty
    return mask


def make_data(empty: bool = True) -> dict[str, torch.Tensor]:
    """Log-probabilities of four models, entropies and advantages, [S, T], one advantage a sample."""
    draw = torch.Generator().manual_seed(5)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(*shape, generator=draw)

    old = normal(S, T) - 3
    data = {"mask": make_mask(empty), "old": old, "log_probs": old + normal(S, T, scale=0.6)}
    data |= {"ref": old + normal(S, T, scale=0.8), "rollout": old + normal(S, T, scale=0.7)}
    return data | {"entropy": normal(S, T).abs(), "advantages": normal(S, 1).expand(S, T).contiguous()}


def close(given: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(given.float(), wanted.float(), rtol=2e-5, atol=2e-6)


def with_gradient(loss_of, data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss, and its gradient at the trainable tokens' log-probabilities."""
    log_probs = data["log_probs"].clone().requires_grad_()
    loss = loss_of(log_probs)
    loss.backward()
    return loss.detach(), log_probs.grad[data["mask"]]


def ours(data: dict[str, torch.Tensor], per_token: bool = False, constant: int | None = None, **settings):
    """Miles' loss and gradient, by its sample mean unless `per_token` or divided by a `constant` length."""
    columns = {"old_log_probs": data["old"], "rollout_log_probs": data["rollout"], "ref_log_probs": data["ref"]}
    masks = data["mask"].int().tolist()
    packed = whole_step(masks, per_token, constant, advantages=data["advantages"], **columns)

    def loss_of(log_probs: torch.Tensor) -> torch.Tensor:
        entropy = data["entropy"].flatten()
        return compute_policy_loss(log_probs.flatten(), entropy, packed, PolicySettings(**settings), None)[0]

    return with_gradient(loss_of, data)


def same(given, wanted) -> None:
    for a, b in zip(given, wanted, strict=True):
        close(a, b)


# Losses


AGGREGATIONS = [
    ("token-mean", {"per_token": True}, {}),
    ("seq-mean-token-mean", {}, {}),
    ("seq-mean-token-sum-norm", {"constant": 50}, {"loss_scale_factor": 50}),
]
FORMS = [
    ("vanilla", BOUNDS, VERL_BOUNDS | {"clip_ratio_c": NEVER}),
    ("vanilla", BOUNDS | {"eps_clip_c": 1.5}, VERL_BOUNDS | {"clip_ratio_c": 1.5}),
    ("gspo", GSPO, {"clip_ratio_low": 0.03, "clip_ratio_high": 0.04}),
    ("cispo", {"form": "clipped_weight"} | BOUNDS, VERL_BOUNDS),
]


@pytest.mark.parametrize("form", FORMS, ids=["clip-higher", "dual-clip", "gspo", "cispo"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=[name for name, _, _ in AGGREGATIONS])
def test_policy_losses_and_their_gradients_are_verls(form, aggregation):
    (kind, settings, theirs), (mean, how, scale), data = form, aggregation, make_data()
    wanted = with_gradient(lambda x: verl_loss(kind, x, data, mean, **theirs, **scale), data)
    same(ours(data, **how, **settings), wanted)


@pytest.mark.parametrize(
    "settings, theirs",
    [
        (BOUNDS, TRL_BOUNDS),
        (BOUNDS | {"eps_clip_c": 1.5}, TRL_BOUNDS | {"delta": 1.5}),
        (GSPO, {"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04}),
        # TRL's bound of CISPO is the ratio itself, and it has no lower one.
        (
            {"form": "clipped_weight", "eps_clip": 1.0, "eps_clip_high": 0.28},
            {"epsilon_high": 1.28, "loss_type": "cispo"},
        ),
        (BOUNDS | {"opsm_delta": 0.05}, TRL_BOUNDS | {"off_policy_mask_threshold": 0.05}),
        (BOUNDS | {"entropy_coef": 0.3}, TRL_BOUNDS | {"entropy_coef": 0.3}),
        (BOUNDS | {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3"}, TRL_BOUNDS | {"beta": 0.2}),
        (
            BOUNDS | {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3", "use_unbiased_kl": True},
            TRL_BOUNDS | {"beta": 0.2, "use_bias_correction_kl": True},
        ),
    ],
    ids=["clip-higher", "dual-clip", "gspo", "cispo", "opsm", "entropy", "kl-loss", "unbiased-kl"],
)
def test_policy_losses_and_their_gradients_are_trls(settings, theirs):
    data = make_data()
    wanted = with_gradient(lambda x: trl_loss(x, data, **theirs), data)
    same(ours(data, per_token=True, **settings), wanted)


@pytest.mark.parametrize(
    "how, theirs",
    [
        # Not with an empty sample: TRL counts it in the mean over samples, Miles and verl don't.
        ({}, {"loss_type": "grpo"}),
        ({"per_token": True}, {"loss_type": "bnpo"}),
        ({"per_token": True}, {"loss_type": "dapo"}),
        ({"constant": 50}, {"loss_type": "dr_grpo", "max_completion_length": 50}),
    ],
    ids=["sample-mean", "token-mean", "token-mean-of-the-step", "constant-length"],
)
def test_means_are_trls(how, theirs):
    data = make_data(empty=False)
    wanted = with_gradient(lambda x: trl_loss(x, data, **TRL_BOUNDS, **theirs), data)
    same(ours(data, **how, **BOUNDS), wanted)


def test_the_value_loss_is_twice_verls():
    # verl has PPO's factor of 1/2; Miles, like upstream, has not: the learning rate of Adam does not feel it.
    data = make_data()
    values, old, returns, mask = data["log_probs"], data["old"], data["ref"], data["mask"]
    packed = whole_step(mask.int().tolist(), per_token_loss=True)
    wanted, clipped = core_algos.compute_value_loss(values, returns, old, mask.float(), 0.3)
    term = value_loss(values.flatten(), old.flatten(), returns.flatten(), 0.3)
    close(weighted_sum(term.loss_N, packed.weight_N), 2 * wanted)
    close(weighted_sum(term.clipped_N, packed.metric_weight_N), clipped)


@pytest.mark.parametrize("kind", ["k1", "k2", "low_var_kl"])
def test_kl_estimates_are_verls(kind):
    # From far too small to far too large. verl's "k3" is bounded as "low_var_kl" is; ours is not (TRL's neither).
    log_probs = torch.linspace(-40, 0, 401)
    ref = torch.full((401,), -20.0)
    close(kl_estimate(log_probs, ref, kind), core_algos.kl_penalty_forward(log_probs, ref, kind))


# Corrections


@pytest.mark.parametrize("mode, low, high, threshold", [("truncate", 0.0, 2.0, 2.0), ("mask", 0.5, 2.0, "0.5_2.0")])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_are_verls(level, mode, low, high, threshold):
    data = make_data()
    mask = data["mask"]
    log_ratio = data["old"] - data["rollout"]
    wanted, _ = rollout_corr_helper.compute_rollout_correction_weights(log_ratio, mask.float(), level, threshold)
    sums = SampleSums(whole_step(mask.int().tolist()), None)
    given, _ = importance_weights(log_ratio.flatten(), TisSettings(level, mode, low, high), sums)
    close(given.view(S, T)[mask], wanted[mask])

    # And in the loss, of both packages.
    settings = BOUNDS | {"tis": TisSettings(level, mode, low, high)}
    of_verl = with_gradient(
        lambda x: verl_loss("vanilla", x, data, "token-mean", wanted, **VERL_BOUNDS, clip_ratio_c=NEVER), data
    )
    of_trl = with_gradient(lambda x: trl_loss(x, data, wanted, **TRL_BOUNDS), data)
    result = ours(data, per_token=True, **settings)
    same(result, of_verl)
    same(result, of_trl)


@pytest.mark.parametrize(
    "level, option, low, high",
    [
        ("token", "token_k1", 0.625, 1.25),
        ("sequence", "seq_sum_k1", 0.625, 1.25),
        ("geometric", "seq_mean_k1", 0.8, 1.1),
    ],
)
def test_rejection_is_verls(level, option, low, high):
    # verl's bounds are for p_engine / p_trainer, ours for its inverse.
    data = make_data(empty=False)
    mask = data["mask"]
    log_ratio = data["old"] - data["rollout"]
    wanted, _ = rollout_corr_helper.compute_rollout_rejection_mask(log_ratio, mask.float(), option, f"{low}_{high}")
    sums = SampleSums(whole_step(mask.int().tolist()), None)
    out, _ = rejected(log_ratio.flatten(), RejectionSettings(level, 1 / high, 1 / low, None), sums)
    kept = ~out.view(S, T) & mask
    assert torch.equal(kept, wanted.bool())
    assert 0 < kept.sum() < mask.sum()


# Advantages


REWARDS = [1.0, 0.0, 2.5, 1.0, -1.0, 0.0, 3.0, 0.5]


def responses_of(mask: torch.Tensor) -> Responses:
    return Responses(torch.arange(S + 1) * T, mask.flatten())


def advantages_of(estimator: str, mask: torch.Tensor, std: bool = True, kl=None, kl_coef=0.0, **how) -> torch.Tensor:
    """Miles' advantages, and returns or None, [S, T]."""
    rewards = torch.from_numpy(shape_rewards(ESTIMATORS[estimator], REWARDS, GROUPS, range(S), std=std))
    kl = None if kl is None else kl.flatten()
    inputs = AdvantageInputs(responses_of(mask), rewards, kl=kl, kl_coef=kl_coef, **how)
    result = compute_advantages(ESTIMATORS[estimator], inputs)
    return result.advantages.view(S, T), None if result.returns is None else result.returns.view(S, T)


def whitened(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Ours, with the sample's variance that verl takes instead of the population's."""
    count = mask.sum()
    ours = whiten(advantages.flatten(), mask.flatten(), lambda x: None).view(S, T)
    return ours * math.sqrt((count - 1) / count)


def last_token_rewards(mask: torch.Tensor) -> torch.Tensor:
    """[S, T], where verl expects a sample's reward; a sample without trainable tokens has it at its last one."""
    rewards = torch.zeros(S, T)
    for sample, row in enumerate(mask):
        rewards[sample, row.nonzero().max() if row.any() else -1] = REWARDS[sample]
    return rewards


@pytest.mark.parametrize(
    "estimator, function, settings",
    [
        ("grpo", core_algos.compute_grpo_outcome_advantage, {}),
        ("dr_grpo", core_algos.compute_grpo_outcome_advantage, {"norm_adv_by_std_in_grpo": False}),
        ("rloo", core_algos.compute_rloo_outcome_advantage, {}),
    ],
)
def test_outcome_advantages_are_verls(estimator, function, settings):
    # In a group of one they differ: verl keeps the reward itself, which is no comparison; Miles gives 0.
    mask = make_mask(empty=True)
    wanted, _ = function(last_token_rewards(mask), mask.float(), np.array(GROUPS), **settings)
    close(advantages_of(estimator, mask)[0], wanted)


def test_reinforce_plus_plus_is_verls():
    data = make_data()
    mask, kl = data["mask"], kl_estimate(data["old"], data["ref"], "k2")
    rewards = last_token_rewards(mask) - 0.1 * kl
    config = type("Config", (), {"gamma": 0.9})
    wanted, returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(rewards, mask.float(), config)
    given, _ = advantages_of("reinforce_plus_plus", mask, kl=kl, kl_coef=0.1, gamma=0.9)
    close(given, returns)
    close(whitened(given, mask), wanted)


def test_reinforce_plus_plus_with_baseline_is_verls():
    # Without a KL in the reward, of which verl's baseline would take part: Miles subtracts it from single tokens.
    mask = make_mask(empty=True)
    wanted, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
        last_token_rewards(mask), mask.float(), np.array(GROUPS)
    )
    close(whitened(advantages_of("reinforce_plus_plus_baseline", mask)[0], mask), wanted)


@pytest.mark.parametrize("gamma, lambd", [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8), (0.99, 0.0)])
def test_gae_is_verls(gamma, lambd):
    data = make_data()
    mask, values = data["mask"], data["entropy"]
    wanted, returns = core_algos.compute_gae_advantage_return(
        last_token_rewards(mask), values, mask.float(), gamma, lambd
    )
    given, targets = advantages_of("ppo", mask, values=values.flatten(), gamma=gamma, lambd=lambd)
    close(targets[mask], returns[mask])
    close(whitened(given, mask)[mask], wanted[mask])
