"""What the flags of rewards take, and what follows from them; sentences/reward.txt has what is refused."""

from typing import get_args

import pytest

from miles.config import RunConfig
from miles.config.resolve import ConfigError, resolve
from miles.config.section import base_type
from miles.rewards import BUILT_IN

# One that compares with no label, or gives several numbers, says so in its record.
LABELLED = ("exact", "math", "dapo", "deepscaler", "gemma_math", "f1", "gpqa", "code")
LABELLED += ("boxed_exact", "boxed_math", "boxed_f1", "boxed_gpqa")


@pytest.mark.parametrize("name", LABELLED)
def test_a_label_is_needed(argv, name):
    with pytest.raises(ConfigError) as caught:
        resolve(argv(rm_type=name, label_key=None, reward_key="score"))
    assert f"--rm-type {name} needs --label-key, the column with the right answer" in caught.value.problems


def test_the_names_are_those_of_the_rewards():
    assert get_args(base_type(RunConfig.model_fields["rm_type"].annotation)) == tuple(BUILT_IN)
    assert {*LABELLED, "remote_rm", "reasoning_gym"} <= set(BUILT_IN)


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
