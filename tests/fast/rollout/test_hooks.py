"""Functions of the user's own: loaded once, and what they return is checked."""

import copy

import numpy as np
import pytest
import torch

from miles.rollout.base_types import DynamicFilterOutput
from miles.rollout.hooks import (
    Hooks,
    filter_samples,
    keep_group,
    load_generate,
    load_hooks,
    log_eval,
    log_rollout,
    shaped_rewards,
    show_all_samples,
    take_from_buffer,
    train_batch,
)
from miles.rollout.train_data import train_data
from tests.fast.rollout.finished_samples import finished, four_samples, returning, two_groups

LOADED = """
def takes(*names, waits=False):
    exec(f"{'async ' if waits else ''}def function({', '.join(names)}): return {names!r}")
    return locals()["function"]

rollout = takes("config", "rollout_id", "data_source", "evaluation=False")
rollout_waits = takes("config", "rollout_id", "data_source", "evaluation=False", waits=True)
two = takes("config", "samples")
three = takes("config", "groups", "data_source")
four = takes("config", "rollout_id", "buffer", "num_groups")
log = takes("rollout_id", "config", "samples", "metrics", "seconds")
generate = takes("config", "sample", "sampling_params", waits=True)
generate_at_once = takes("config", "sample", "sampling_params")
"""
# Field of the configuration, field of Hooks, a right function, a wrong one, what is said of it.
FLAGS = [
    ("rollout_function_path", "rollout", "rollout", "two", "must take (config, rollout_id, data_source, evaluation=)"),
    ("rollout_function_path", "rollout", "rollout_waits", "four", "must take (config, rollout_id, data_source, eval"),
    ("eval_function_path", "eval", "rollout", "two", "must take (config, rollout_id, data_source, evaluation=)"),
    ("custom_generate_function_path", "generate", "generate", "generate_at_once", "must be an async function"),
    ("custom_reward_post_process_path", "reward_post_process", "two", "four", "must take (config, samples)"),
    ("custom_convert_samples_to_train_data_path", "convert", "two", "generate", "must not be an async function"),
    ("dynamic_sampling_filter_path", "dynamic_filter", "two", "three", "must take (config, samples)"),
    ("buffer_filter_path", "buffer_filter", "four", "two", "must take (config, rollout_id, buffer, num_groups)"),
    ("rollout_sample_filter_path", "sample_filter", "two", "three", "must take (config, groups)"),
    ("rollout_all_samples_process_path", "all_samples", "three", "two", "must take (config, groups, data_source)"),
    ("custom_rollout_log_function_path", "log_rollout", "log", "two", "must take (rollout_id, config, samples, metric"),
    ("custom_eval_rollout_log_function_path", "log_eval", "four", "two", "must take (rollout_id, config, data, metri"),
]


@pytest.fixture
def mine(monkeypatch, tmp_path):
    (tmp_path / "functions_of_mine.py").write_text(LOADED)
    monkeypatch.syspath_prepend(tmp_path)
    return "functions_of_mine"


@pytest.fixture
def config(engine_config):
    """Two groups of two samples, trained as GRPO does."""
    changes = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "advantage_estimator": "grpo"}
    return engine_config.model_copy(update=changes)


# Loading


@pytest.mark.parametrize(("field", "hook", "right", "wrong", "message"), FLAGS)
def test_each_is_loaded_and_checked(config, mine, field, hook, right, wrong, message):
    assert load_hooks(config) == Hooks()
    hooks = load_hooks(config.model_copy(update={field: f"{mine}.{right}"}))
    assert getattr(hooks, hook).__module__ == mine
    assert sum(getattr(hooks, name) is not None for name in Hooks.__dataclass_fields__) == 1
    with pytest.raises(ValueError) as caught:
        load_hooks(config.model_copy(update={field: f"{mine}.{wrong}"}))
    assert f"--{field.replace('_', '-')} {mine}.{wrong}" in str(caught.value)
    assert message in str(caught.value)


def test_every_hook_is_loaded_from_a_flag():
    assert {hook for _, hook, *_ in FLAGS} == set(Hooks.__dataclass_fields__)


def test_the_trainers_function_is_checked_before_anything_starts(config, mine):
    changed = config.model_copy(update={"rollout_data_postprocess_path": f"{mine}.two"})
    with pytest.raises(
        ValueError, match="--rollout-data-postprocess-path .* must take \\(config, rollout_id, batch, c"
    ):
        load_hooks(changed)


def test_a_generate_function_of_another_flag_is_named_by_it(config, mine):
    assert load_generate(config, f"{mine}.generate", "the set aime").__module__ == mine
    with pytest.raises(ValueError, match="the set aime functions_of_mine.two must be an async function"):
        load_generate(config, f"{mine}.two", "the set aime")


def test_miles_own_generate_functions_look_at_the_configuration(config, monkeypatch):
    asked = []
    monkeypatch.setattr("miles.rollout.hooks.CHECKS", {"miles.rollout.generate.generate": asked.append})
    load_generate(config, "miles.rollout.generate.generate")
    assert asked == [config]


# One group


def test_a_filter_says_keep_or_why_not(config):
    assert keep_group(Hooks(), config, two_groups()[0]) == DynamicFilterOutput(True)
    for result in (True, np.bool_(True), torch.tensor(True), DynamicFilterOutput(torch.tensor(True))):
        assert keep_group(Hooks(dynamic_filter=returning(result)), config, []) == DynamicFilterOutput(True)
    refused = DynamicFilterOutput(False, "too_long")
    assert keep_group(Hooks(dynamic_filter=returning(refused)), config, []) == refused
    for result in (None, 1, "yes", DynamicFilterOutput(None)):
        with pytest.raises(ValueError, match="--dynamic-sampling-filter-path returned .*; it must return a DynamicF"):
            keep_group(Hooks(dynamic_filter=returning(result)), config, [])


def test_groups_taken_out_of_the_buffer(config):
    def pop_last(config, rollout_id, buffer, num_groups):
        assert rollout_id == 5
        return [buffer.pop() for _ in range(num_groups)]

    buffer = [[finished(i, i)] for i in range(5)]
    first, *_, last = buffer
    assert take_from_buffer(Hooks(), config, 5, buffer, 1) == ([first], []) and len(buffer) == 4
    assert take_from_buffer(Hooks(buffer_filter=pop_last), config, 5, buffer, 1) == ([last], []) and len(buffer) == 3


def test_groups_thrown_out_of_the_buffer_are_counted(config):
    def drops_all_but_one(config, rollout_id, buffer, num_groups):
        kept = buffer[-1]
        buffer.clear()
        return [kept]

    a, b, c = buffer = [[finished(i, i)] for i in range(3)]
    assert take_from_buffer(Hooks(buffer_filter=drops_all_but_one), config, 0, buffer, 2) == ([c], [a, b])
    assert buffer == []


def _copies(buffer):
    return [copy.deepcopy(buffer.pop())]


def _puts_a_new_one(buffer):
    buffer.append([finished(9, 9)])
    return []


def _splits_a_group(buffer):
    group = buffer.pop()
    return [group[:1]]


@pytest.mark.parametrize(
    ("take", "message"),
    [
        (lambda buffer: buffer.pop(), "returned a group twice, one that it made itself"),
        (lambda buffer: None, "returned None (NoneType); it must return a list of groups of the buffer"),
        (lambda buffer: buffer[:1], "returned a group twice, one that it made itself, or one that is also elsewhere"),
        (lambda buffer: [buffer.pop()] * 2, "returned a group twice"),
        (_copies, "returned a group twice, one that it made itself"),
        (_splits_a_group, "returned a group twice, one that it made itself"),
        (_puts_a_new_one, "left in the buffer a group twice, one that it made itself"),
        (lambda buffer: [buffer.pop(), buffer.pop()], "returned 2 groups; it was asked for at most 1"),
    ],
)
def test_refused_buffer_filters(config, take, message):
    buffer = [[finished(i, 0) for i in range(2)], [finished(i, 1) for i in range(2)]]
    with pytest.raises(ValueError) as caught:
        take_from_buffer(Hooks(buffer_filter=lambda c, r, buffer, n: take(buffer)), config, 0, buffer, 1)
    assert str(caught.value).startswith("--buffer-filter-path") and message in str(caught.value)


# A collected rollout


def test_a_sample_filter_marks_samples_and_can_not_change_groups(config):
    def mark(config, groups):
        groups[0][0].remove_sample = True
        groups[0].pop()
        groups.pop()

    groups = two_groups()
    filter_samples(Hooks(sample_filter=mark), config, groups)
    assert [[sample.remove_sample for sample in group] for group in groups] == [[True, False], [False, False]]
    filter_samples(Hooks(), config, groups)
    with pytest.raises(
        ValueError, match="--rollout-sample-filter-path returned \\[\\] \\(list\\); it must return noth"
    ):
        filter_samples(Hooks(sample_filter=returning([])), config, groups)


def test_all_samples_are_shown(config):
    shown = []
    groups = two_groups()
    show_all_samples(Hooks(all_samples=lambda *arguments: shown.append(arguments)), config, groups, "data")
    assert shown == [(config, groups, "data")]
    show_all_samples(Hooks(), config, groups, "data")


def test_rewards_are_shaped_as_the_estimator_says_or_the_function(config):
    samples = four_samples()
    raw, shaped = shaped_rewards(Hooks(), config, samples)
    assert raw == [1.0, 0.0, 0.0, 0.0] and shaped == pytest.approx([0.7071, -0.7071, 0.0, 0.0], abs=1e-3)
    unshaped = config.model_copy(update={"disable_rewards_normalization": True})
    assert shaped_rewards(Hooks(), unshaped, samples) == (raw, raw)

    def double(config, samples):
        return [None, *(sample.reward for sample in samples[1:])], torch.tensor([2.0, 1.0, 0.0, -1.0])

    assert shaped_rewards(Hooks(reward_post_process=double), config, samples) == (
        [None, 0.0, 0.0, 0.0],
        [2.0, 1.0, 0.0, -1.0],
    )


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0] * 4, "it must return two lists: raw and shaped rewards"),
        (([1.0] * 4, [1.0] * 3), "returned 3 shaped rewards; it must return a list of 4, one a sample"),
        (([1.0] * 4, 2.0), "returned 2.0 (float) shaped rewards"),
        (([1.0] * 4, [0.0, None, 0.0, 0.0]), "shaped reward 1 is None; each sample needs a finite number"),
        (([1.0] * 4, [0.0, 0.0, float("nan"), 0.0]), "the shaped reward of sample 2 is nan (float), no finite number"),
        ((["1"] * 4, [0.0] * 4), "the raw reward of sample 0 is '1' (str)"),
    ],
)
def test_refused_rewards(config, result, message):
    with pytest.raises(ValueError) as caught:
        shaped_rewards(Hooks(reward_post_process=returning(result)), config, four_samples())
    assert str(caught.value).startswith("--custom-reward-post-process-path") and message in str(caught.value)


def test_the_batch_without_a_function_has_the_raw_rewards_of_the_hook(config):
    batch = train_batch(Hooks(), config, four_samples(), [None, 0.5, 0.5, 0.5], [1.0, 2.0, 3.0, 4.0])
    assert batch["rewards"].tolist() == [1, 2, 3, 4]
    assert np.array_equal(batch["raw_reward"], np.float32([np.nan, 0.5, 0.5, 0.5]), equal_nan=True)
    assert "rewards" not in train_batch(Hooks(), config, four_samples(), None, None)


def test_a_rollout_without_log_probs_is_refused(config):
    samples = four_samples()
    samples[1].rollout_log_probs = samples[2].rollout_log_probs = None
    with pytest.raises(ValueError, match="2 of 4 samples have no rollout_log_probs, sample 1 first"):
        train_batch(Hooks(), config, samples, [1.0] * 4, [1.0] * 4)


def test_a_convert_function_makes_the_batch(config):
    def convert(config, samples):
        return train_data(samples, [3.0] * 4)

    batch = train_batch(Hooks(convert=convert), config, four_samples(), [1.0] * 4, [2.0] * 4)
    assert batch["rewards"].tolist() == [3.0] * 4 and batch["raw_reward"].tolist() == [1.0, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="--custom-convert-samples-to-train-data-path returned no rewards"):
        train_batch(Hooks(convert=lambda c, s: train_data(s, None)), config, four_samples(), [1.0] * 4, [2.0] * 4)


def test_log_functions_see_everything_and_may_leave_out_miles_metrics(config):
    seen = []

    def log(*arguments):
        seen.append(arguments)
        return seen and len(seen) > 1

    samples, metrics = four_samples(), {"rollout/rewards": 1.0}
    assert log_rollout(Hooks(), config, 3, samples, metrics, 1.5) is False
    assert log_rollout(Hooks(log_rollout=log), config, 3, samples, metrics, 1.5) is False
    assert log_rollout(Hooks(log_rollout=log), config, 3, samples, metrics, 1.5) is True
    assert seen == [(3, config, samples, metrics, 1.5)] * 2
    seen.clear()
    assert log_eval(Hooks(log_eval=log), config, 3, {"sums": samples}, metrics) is False
    assert log_eval(Hooks(log_eval=returning(None)), config, 3, {"sums": samples}, metrics) is False
    assert seen == [(3, config, {"sums": samples}, metrics)]
    with pytest.raises(ValueError, match="--custom-rollout-log-function-path returned 1 \\(int\\)"):
        log_rollout(Hooks(log_rollout=returning(1)), config, 3, samples, metrics, 1.5)
