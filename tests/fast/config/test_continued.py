"""Adam's settings of a resumed run: those that are given now, else the checkpoint's."""

import pickle

import pytest

from miles.config.continued import continued, settings_of, settings_without_names
from miles.config.resolve import resolve
from miles.ray.train.group import critic_config

FIRST = {
    "lr": "1e-5",
    "min_lr": "1e-7",
    "lr_decay_style": "cosine",
    "lr_warmup_iters": "3",
    "weight_decay": "0.1",
    "adam_beta2": "0.98",
    "num_rollout": "20",
}


@pytest.fixture
def config(argv):
    return lambda **changes: resolve(argv(**changes)).config


def test_what_is_given_is_known_in_a_copy_and_in_another_process(config, tmp_path):
    given = config(lr="1e-5").given
    assert "lr" in given and given.isdisjoint(("min_lr", "lr_decay_iters"))
    copied = config(lr="1e-5").model_copy(update={"min_lr": 0.0})
    assert copied.given == given == pickle.loads(pickle.dumps(copied)).given


def test_the_same_command_line_changes_nothing(config):
    run = config(**FIRST)
    found, sentences = continued(run, settings_of(run))
    assert dict(found) == dict(run) and sentences == []


def test_what_is_not_given_is_the_checkpoints(config):
    first, again = config(**FIRST), config(num_rollout="20")
    found, sentences = continued(again, settings_of(first))
    assert settings_of(found) == settings_of(first)
    assert (found.lr, found.lr_decay_style, found.weight_decay, found.adam_beta2) == (1e-5, "cosine", 0.1, 0.98)
    assert "--weight-decay is not given: the checkpoint's 0.1 stays, not 0.01" in sentences
    assert len(sentences) == 6


def test_what_is_given_wins(config):
    changes = {
        "lr": "2e-5",
        "lr_decay_style": "linear",
        "weight_decay": "0",
        "adam_eps": "1e-6",
        "lr_warmup_iters": "5",
    }
    found, sentences = continued(config(**FIRST | changes), settings_of(config(**FIRST)))
    assert settings_of(found) == settings_of(config(**FIRST | changes))
    assert sorted(sentences) == [
        "--adam-eps 1e-06 replaces the checkpoint's 1e-08",
        "--lr 2e-05 replaces the checkpoint's 1e-05",
        "--lr-decay-style linear replaces the checkpoint's cosine",
        "--lr-warmup-iters 5 replaces the checkpoint's 3",
        "--weight-decay 0.0 replaces the checkpoint's 0.1",
    ]


def test_the_decay_ends_with_the_longer_run_unless_its_length_was_given(config):
    longer = config(**FIRST | {"num_rollout": "60"})
    found, sentences = continued(longer, settings_of(config(**FIRST)))
    assert (found.lr_decay_iters, sentences) == (60, [])
    found, sentences = continued(longer, settings_of(config(**FIRST, lr_decay_iters="30")))
    assert found.lr_decay_iters == 30
    assert sentences == ["--lr-decay-iters is not given: the checkpoint's 30 stays, not 60"]
    # And is kept in the next checkpoint.
    assert settings_of(found)["lr_decay_iters"] == 30


def test_what_belongs_together_comes_from_one_side(config):
    wsd = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": "4", "lr_wsd_decay_style": "linear"}
    rises = {"weight_decay_incr_style": "linear", "start_weight_decay": "0", "end_weight_decay": "0.1"}
    first = config(**FIRST | wsd, **{name: value for name, value in rises.items() if name not in FIRST})
    found, _ = continued(config(**FIRST), settings_of(first))
    assert (found.lr_decay_style, found.lr_wsd_decay_iters, found.lr_wsd_decay_style) == ("cosine", None, "exponential")
    assert (found.weight_decay, found.weight_decay_incr_style, found.end_weight_decay) == (0.1, "constant", None)
    found, _ = continued(config(num_rollout="20"), settings_of(first))
    assert settings_of(found) == settings_of(first)
    fraction = {name: value for name, value in FIRST.items() if name != "lr_warmup_iters"} | {
        "lr_warmup_fraction": "0.5"
    }
    found, _ = continued(config(**fraction), settings_of(config(**FIRST)))
    assert (found.lr_warmup_iters, found.lr_warmup_fraction) == (0, 0.5)


def test_what_does_not_go_together_is_refused(config):
    first = settings_of(config(**FIRST | {"min_lr": "1e-6"}))
    with pytest.raises(
        ValueError, match=r"--min-lr 1e-06 must not be above --lr 1e-07 \(what is not given is as in the"
    ):
        continued(config(num_rollout="20", lr="1e-7"), first)


def test_a_checkpoint_without_names(config):
    scheduler = {
        "max_lr": 1e-5, "lr_warmup_steps": 3, "num_steps": 7, "lr_decay_style": "cosine", "lr_decay_steps": 20,
        "min_lr": 1e-7, "start_wd": 0.1, "end_wd": 0.1, "wd_incr_style": "constant", "wd_incr_steps": 0,
    }  # fmt: skip
    settings = settings_without_names(scheduler, {"betas": (0.9, 0.98), "eps": 1e-8})
    found, _ = continued(config(num_rollout="20"), settings)
    assert settings_of(found) == settings_of(config(**FIRST))
    found, _ = continued(config(num_rollout="60", lr="2e-5"), settings)
    assert (found.lr, found.weight_decay, found.lr_decay_iters) == (2e-5, 0.1, 60)
    rising = settings_without_names(
        scheduler | {"start_wd": 0.0, "wd_incr_style": "linear"}, {"betas": (0, 0), "eps": 1}
    )
    assert (rising["start_weight_decay"], rising["end_weight_decay"]) == (0.0, 0.1) and "weight_decay" not in rising
    assert "lr_decay_style" not in settings_without_names(
        scheduler | {"lr_decay_style": "WSD"}, {"betas": (0, 0), "eps": 1}
    )


def test_a_critic_has_settings_of_its_own(config):
    ppo = {"advantage_estimator": "ppo", "num_rollout": "20"}
    first = settings_of(critic_config(config(**ppo, critic_lr="3e-5", critic_lr_warmup_iters="4")))
    found, _ = continued(critic_config(config(**ppo)), first)
    assert (found.lr, found.lr_warmup_iters) == (3e-5, 4)
    for flag in ("critic_lr", "lr"):
        found, _ = continued(critic_config(config(**ppo, **{flag: "7e-5"})), first)
        assert (found.lr, found.lr_warmup_iters) == (7e-5, 4)
    found, _ = continued(critic_config(config(**ppo, lr_warmup_iters="9", critic_lr_warmup_iters="2")), first)
    assert (found.lr, found.lr_warmup_iters) == (3e-5, 2)
