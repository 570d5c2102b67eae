"""The rules of rewards' flags, broken once each, and what they allow."""

from typing import get_args

import pytest

from miles.config import RunConfig
from miles.config.resolve import ConfigError, resolve
from miles.config.reward import WITHOUT_LABEL
from miles.config.reward_rules import REWARD_RULES
from miles.config.section import base_type
from miles.rewards import BUILT_IN

URL = "http://10.0.0.7:8000/reward"
CUSTOM = {"rm_type": None, "custom_rm_path": "my_module.reward"}
EVALUATED = {"eval_prompt_data": "a held_out.jsonl", "eval_interval": "2"}
CASES = {
    "_remote_reward": [
        ({"rm_type": "remote_rm"}, "--rm-type remote_rm needs --rm-url, the address of its service, such as http"),
        ({"rm_url": "10.0.0.7:8000"}, "--rm-url 10.0.0.7:8000 must be an address such as http://10.0.0.7:8000/reward"),
        ({"rm_type": "remote_rm", "rm_url": "ftp://a/b"}, "--rm-url ftp://a/b must be an address"),
        ({"rm_type": "remote_rm", "rm_url": "http://a:port/"}, "--rm-url http://a:port/ must be an address"),
        ({"rm_type": "remote_rm", "rm_url": "http:///reward"}, "--rm-url http:///reward must be an address"),
    ],
    "_group_reward": [
        ({"group_rm": ""}, "--group-rm needs --custom-rm-path, a function of (config, samples)"),
    ],
    "_reward_keys": [
        ({"rm_type": "dapo"}, "--rm-type dapo gives score (1 or -1) and acc (1 or 0): choose one with --reward-key"),
        ({"rm_type": "dapo", "reward_key": "pred", "eval_reward_key": "acc"},
         "--reward-key pred is no number of --rm-type dapo, which gives score and acc"),
        ({"rm_type": "dapo", "reward_key": "acc", "eval_reward_key": "length"},
         "--eval-reward-key length is no number of --rm-type dapo"),
    ],
}  # fmt: skip


def test_the_table_has_every_rule():
    assert list(CASES) == [rule.__name__ for rule in REWARD_RULES]


@pytest.mark.parametrize(("changes", "message"), [case for cases in CASES.values() for case in cases])
def test_broken_rule(argv, changes, message):
    with pytest.raises(ConfigError) as caught:
        resolve(argv(**changes))
    (problem,) = caught.value.problems
    assert message in problem


@pytest.mark.parametrize(
    "changes",
    [
        {"rm_type": "remote_rm", "rm_url": URL, "label_key": None},
        {"rm_type": "remote_rm", "rm_url": URL, "label_key": None, **EVALUATED},
        {"rm_url": URL},
        {"rm_type": "dapo", "reward_key": "score"},
        {"rm_type": "dapo", "reward_key": "score", "eval_reward_key": "acc", **EVALUATED},
        {"rm_type": "boxed_math"},
        {"rm_type": "code"},
        {**CUSTOM, "group_rm": "", "label_key": None},
        {**CUSTOM, "reward_key": "pred"},
        {"rm_type": "dapo", "debug_train_only": "", "loss_type": "sft_loss", "n_samples_per_prompt": "1"},
    ],
)
def test_accepted(argv, changes):
    assert resolve(argv(**changes)).warnings == []


@pytest.mark.parametrize("name", sorted({*BUILT_IN} - {*WITHOUT_LABEL}))
def test_a_label_is_needed(argv, name):
    with pytest.raises(ConfigError) as caught:
        resolve(argv(rm_type=name, label_key=None, reward_key="score"))
    assert f"--rm-type {name} needs --label-key, the column with the right answer" in caught.value.problems


def test_the_names_are_those_of_the_rewards():
    assert set(get_args(base_type(RunConfig.model_fields["rm_type"].annotation))) == set(BUILT_IN)
    assert set(WITHOUT_LABEL) <= set(BUILT_IN)


def test_the_key_of_evaluation_follows(argv):
    for flags, expected in (("", None), ("--reward-key a", "a"), ("--reward-key a --eval-reward-key b", "b")):
        assert resolve(argv(flags)).config.eval_reward_key == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [("rm_request_timeout", "0"), ("rm_request_retries", "-1"), ("rm_max_concurrency", "0")],
)
def test_ranges(argv, name, value):
    with pytest.raises(ConfigError) as caught:
        resolve(argv(**{name: value}))
    (problem,) = caught.value.problems
    assert problem.startswith(f"--{name.replace('_', '-')} is '{value}': input should be ")
