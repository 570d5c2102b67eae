"""Every rule of the optimizer's flags, broken once."""

import pytest

from miles.config.optimizer_rules import OPTIMIZER_RULES
from miles.config.resolve import ConfigError, resolve

CASES = {
    "_rates": [
        ({"lr_decay_iters": "4", "lr_warmup_iters": "4"}, "--lr-warmup-iters 4 must be less than --lr-decay-iters 4"),
        ({"min_lr": "1"}, "--min-lr 1.0 must not be above --lr 1e-06"),
    ],
    "_rate_schedule": [
        ({"lr_warmup_fraction": "0.1", "lr_warmup_iters": "1"}, "both set the warm-up; keep one"),
        ({"lr_warmup_init": "1"}, "--lr-warmup-init 1.0 is above --lr 1e-06"),
        ({"lr_decay_style": "WSD"}, "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
        ({"lr_wsd_decay_iters": "3"}, "--lr-wsd-decay-iters is for --lr-decay-style WSD and that is constant"),
        ({"lr_wsd_decay_style": "cosine"}, "--lr-wsd-decay-style is for --lr-decay-style WSD and that is constant"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": "4"}, "--lr-wsd-decay-iters 4 is more than --lr-decay-iters"),
    ],
    "_weight_decay": [
        ({"end_weight_decay": "1"}, "--end-weight-decay is for a weight decay that rises"),
        ({"weight_decay_incr_style": "linear", "end_weight_decay": "1"}, "needs --start-weight-decay and"),
        ({"weight_decay_incr_style": "linear", "start_weight_decay": "1", "end_weight_decay": "0.5"},
         "--end-weight-decay 0.5 is below --start-weight-decay 1.0"),
    ],
}  # fmt: skip


def test_the_table_has_every_rule():
    assert list(CASES) == [rule.__name__ for rule in OPTIMIZER_RULES]


@pytest.mark.parametrize(("changes", "expected"), [case for cases in CASES.values() for case in cases])
def test_refused(argv, changes, expected):
    with pytest.raises(ConfigError) as caught:
        resolve(argv(**changes))
    assert sum(expected in problem for problem in caught.value.problems) == 1, caught.value.problems


@pytest.mark.parametrize(
    "changes",
    [
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": "2", "lr_warmup_fraction": "0.1"},
        {"weight_decay_incr_style": "cosine", "start_weight_decay": "0", "end_weight_decay": "0.1"},
        {"lr_warmup_iters": "2"},
        {"lr_warmup_iters": "1", "lr_warmup_init": "1e-7"},
    ],
)
def test_taken(argv, changes):
    assert resolve(argv(**changes)).warnings == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"lr": "0"}, "--lr 0: the weights will not change"),
        ({"min_lr": "1e-9"}, "--min-lr 1e-09 has no effect with --lr-decay-style constant"),
        (
            {"lr_warmup_iters": "1"},
            "--lr-warmup-iters 1: the one step of the warm-up has the rate --lr-warmup-init 0.0",
        ),
        ({"advantage_estimator": "ppo", "critic_lr_warmup_iters": "1"}, "--critic-lr-warmup-iters 1: the one step of"),
    ],
)
def test_warned(argv, changes, expected):
    assert sum(expected in warning for warning in resolve(argv(**changes)).warnings) == 1
