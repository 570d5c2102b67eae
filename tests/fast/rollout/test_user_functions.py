"""What the user's functions return is checked."""

import copy
import threading

import numpy as np
import pytest
import torch

from miles.rollout.base_types import DynamicFilterOutput, RolloutFnEvalOutput, RolloutFnTrainOutput
from miles.rollout.hooks import Hooks
from miles.rollout.train_data import train_data
from miles.rollout.user_functions import (
    all_samples,
    buffer_filter,
    convert,
    dynamic_filter,
    evaluation,
    generate,
    log_eval,
    log_rollout,
    reward_post_process,
    rollout,
    sample_filter,
)
from miles.utils.types import Sample
from tests.fast.rollout.finished_samples import awaited, finished, four_samples, returning, two_groups


@pytest.fixture
def config(engine_config):
    """Two groups of two samples, trained as GRPO does."""
    changes = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "advantage_estimator": "grpo"}
    return engine_config.model_copy(update=changes)


# The whole rollout


async def test_a_rollout_in_the_loop_or_in_a_thread(config):
    called = []

    def at_once(config, rollout_id, data_source, evaluation=True):
        called.append((rollout_id, data_source, evaluation, threading.current_thread() is threading.main_thread()))
        return RolloutFnTrainOutput(two_groups(), {"mine/rounds": 3})

    async def waits(config, rollout_id, data_source, evaluation=True):
        return at_once(config, rollout_id, data_source, evaluation)

    for function in (at_once, waits):
        output = await rollout(awaited(function))(config, 7, "data")
        assert [len(group) for group in output.samples] == [2, 2] and output.metrics == {"mine/rounds": 3.0}
    assert called == [(7, "data", False, False), (7, "data", False, True)]


async def test_a_rollout_may_be_the_groups_alone(config):
    output = await rollout(awaited(returning(tuple(map(tuple, two_groups())))))(config, 0, None)
    assert output.metrics == {} and [[s.index for s in group] for group in output.samples] == [[0, 1], [2, 3]]


async def test_pieces_of_a_trajectory_count_once(config):
    groups = two_groups()
    groups[0].append(finished(1, 0, 0.0, rollout_id=1))
    groups[0][1].rollout_id = 1
    output = await rollout(awaited(returning(groups)))(config, 0, None)
    assert len(output.samples[0]) == 3


def changed(group, member, **changes):
    groups = two_groups()
    for name, value in changes.items():
        setattr(groups[group][member], name, value)
    return groups


SAME = finished(9, 9)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "returned None (NoneType); it must return a RolloutFnTrainOutput, or a list of groups of samples"),
        ({"samples": []}, "(dict); it must return a RolloutFnTrainOutput"),
        (RolloutFnTrainOutput(None), "returned samples None (NoneType); they must be a list of groups of samples"),
        ([finished(0, 0)], "group 0 is Sample("),
        ([["text"], ["text"]], "group 0 holds 'text' (str); it must hold Samples only"),
        ([[], []], "group 0 is [] (list); it must be a list of at least one Sample"),
        ([[SAME, SAME]], "group 0 holds one Sample object twice"),
        (two_groups()[:1], "returned 1 groups; it must return --rollout-batch-size 2"),
        ([group[:1] for group in two_groups()], "group 0 has 1 trajectories in 1 samples; it must have --n-samples-pe"),
        (changed(1, 0, group_index=0), "the samples of group 1 have the group_index [0, 1]"),
        (changed(1, 0, index=None), "the samples of group 1 have the group_index [1] and the index [3, None]"),
        ([two_groups()[0]] * 2, "the groups 0 and 1 share group_index 0"),
        (changed(1, 0, index=1), "trajectory 1 is in group 1 and in one before it"),
        (changed(1, 1, status=Sample.Status.ABORTED), "returned sample 3 of group 1 with status aborted; it must be "),
        (changed(1, 1, loss_mask=[1]), "sample 3 of group 1: loss_mask has 1 entries for a response of 2 tokens"),
        (
            RolloutFnTrainOutput(two_groups(), [1]),
            "returned metrics [1] (list); they must be a dict of numbers by name",
        ),
        (RolloutFnTrainOutput(two_groups(), {"a": "b"}), "returned the metric 'a': 'b' (str); it must be a number"),
    ],
)
async def test_refused_rollouts(config, result, message):
    with pytest.raises(ValueError) as caught:
        await rollout(awaited(returning(result)))(config, 0, None)
    assert message in str(caught.value)


async def test_an_evaluation(config):
    async def evaluate(config, rollout_id, data_source, evaluation=False):
        assert evaluation and rollout_id == 3
        return RolloutFnEvalOutput({"sums": four_samples()}, {"mine/score": np.float32(0.5)})

    output = await evaluation(awaited(evaluate))(config, 3, None)
    assert len(output.data["sums"]) == 4 and output.metrics == {"mine/score": 0.5}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"sums": four_samples()}, "(dict); it must return a RolloutFnEvalOutput"),
        (RolloutFnEvalOutput([finished(0, 0)]), "it must be a dict of lists of samples by name"),
        (RolloutFnEvalOutput({"sums": []}), "evaluation set 'sums' is [] (list); it must be a list of at least one"),
        (RolloutFnEvalOutput({"sums": [Sample(0, 0)]}), "returned sample 0 of group 0 with status pending"),
    ],
)
async def test_refused_evaluations(config, result, message):
    with pytest.raises(ValueError) as caught:
        await evaluation(awaited(returning(result)))(config, 0, None)
    assert str(caught.value).startswith("--eval-function-path") and message in str(caught.value)


# One sample, one group


async def test_pieces_get_the_identity_of_their_sample(config):
    async def fans_out(config, sample, sampling_params):
        return [finished(None, None), finished(77, 5)]

    sample = Sample(group_index=4, index=12, tokens=[1, 2])
    pieces = await generate(fans_out)(config, sample, {})
    assert [(piece.group_index, piece.index, piece.rollout_id) for piece in pieces] == [(4, 12, 12)] * 2


async def test_one_sample_stays_as_it_is(config):
    async def completes(config, sample, sampling_params):
        sample.status = Sample.Status.ABORTED
        sample.reward = np.float32(0.5)
        return sample

    sample = Sample(group_index=4, index=12, tokens=[1, 2])
    (piece,) = await generate(completes)(config, sample, {})
    assert piece is sample and piece.rollout_id is None
    assert type(piece.reward) is float  # JSON knows no other


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "sample 12 is None (NoneType); it must be a list of at least one Sample"),
        ([], "sample 12 is [] (list)"),
        ([finished(0, 0), "text"], "sample 12 holds 'text' (str)"),
        (Sample(tokens=[1]), "left sample 12 pending; it must set status to how generation ended"),
        (finished(0, 0, reward="1.0"), "the reward of sample 12 of group 4 is '1.0' (str)"),
        (
            finished(0, 0, metadata={"a": [{1}]}),
            "metadata of sample 12 of group 4['a'][0] is {1} (set), which JSON has",
        ),
        (lambda: finished(0, 0, tokens=[1, 2, object(), 4]), "sample 0: tokens = [1, 2, <object"),
        (
            finished(0, 0, status="done"),
            "the status of sample 12 of group 4 is 'done' (str); it must be one of pending",
        ),
        (finished(0, 0, rollout_log_probs=[0.0]), "rollout_log_probs has 1 entries for a response of 2 tokens"),
    ],
)
async def test_refused_generations(config, result, message):
    async def returns(config, sample, sampling_params):
        return result() if callable(result) else result

    with pytest.raises(ValueError) as caught:
        await generate(returns)(config, Sample(group_index=4, index=12, tokens=[1, 2]), {})
    assert message in str(caught.value)


# One group


def test_a_filter_says_keep_or_why_not(config):
    assert Hooks().keep_group(config, two_groups()[0]) == DynamicFilterOutput(True)
    for result in (True, np.bool_(True), torch.tensor(True), DynamicFilterOutput(torch.tensor(True))):
        assert dynamic_filter(returning(result))(config, []) == DynamicFilterOutput(True)
    refused = DynamicFilterOutput(False, "too_long")
    assert dynamic_filter(returning(refused))(config, []) == refused
    for result in (None, 1, "yes", DynamicFilterOutput(None)):
        with pytest.raises(ValueError, match="--dynamic-sampling-filter-path returned .*; it must return a DynamicF"):
            dynamic_filter(returning(result))(config, [])


def test_groups_taken_out_of_the_buffer(config):
    def pop_last(config, rollout_id, buffer, num_groups):
        assert rollout_id == 5
        return [buffer.pop() for _ in range(num_groups)]

    buffer = [[finished(i, i)] for i in range(5)]
    first, *_, last = buffer
    assert Hooks().take_from_buffer(config, 5, buffer, 1) == ([first], []) and len(buffer) == 4
    assert buffer_filter(pop_last)(config, 5, buffer, 1) == ([last], []) and len(buffer) == 3


def test_groups_thrown_out_of_the_buffer_are_counted(config):
    def drops_all_but_one(config, rollout_id, buffer, num_groups):
        kept = buffer[-1]
        buffer.clear()
        return [kept]

    a, b, c = buffer = [[finished(i, i)] for i in range(3)]
    assert buffer_filter(drops_all_but_one)(config, 0, buffer, 2) == ([c], [a, b])
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
        buffer_filter(lambda c, r, buffer, n: take(buffer))(config, 0, buffer, 1)
    assert str(caught.value).startswith("--buffer-filter-path") and message in str(caught.value)


# A collected rollout


def test_a_sample_filter_marks_samples_and_can_not_change_groups(config):
    def mark(config, groups):
        groups[0][0].remove_sample = True
        groups[0].pop()
        groups.pop()

    groups = two_groups()
    sample_filter(mark)(config, groups)
    assert [[sample.remove_sample for sample in group] for group in groups] == [[True, False], [False, False]]
    Hooks().filter_samples(config, groups)
    with pytest.raises(
        ValueError, match="--rollout-sample-filter-path returned \\[\\] \\(list\\); it must return noth"
    ):
        sample_filter(returning([]))(config, groups)


def test_all_samples_are_shown(config):
    shown = []
    groups = two_groups()
    all_samples(lambda *arguments: shown.append(arguments))(config, groups, "data")
    assert shown == [(config, groups, "data")]
    Hooks().show_all_samples(config, groups, "data")


def test_rewards_are_shaped_as_the_estimator_says_or_the_function(config):
    samples = four_samples()
    raw, shaped = Hooks().shape_rewards(config, samples)
    assert raw == [1.0, 0.0, 0.0, 0.0] and shaped == pytest.approx([0.7071, -0.7071, 0.0, 0.0], abs=1e-3)
    unshaped = config.model_copy(update={"disable_rewards_normalization": True})
    assert Hooks().shape_rewards(unshaped, samples) == (raw, raw)

    def double(config, samples):
        return [None, *(sample.reward for sample in samples[1:])], torch.tensor([2.0, 1.0, 0.0, -1.0])

    assert reward_post_process(double)(config, samples) == (
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
        reward_post_process(returning(result))(config, four_samples())
    assert str(caught.value).startswith("--custom-reward-post-process-path") and message in str(caught.value)


def test_the_batch_without_a_function_has_the_raw_rewards_of_the_hook(config):
    batch = Hooks().make_batch(config, four_samples(), [None, 0.5, 0.5, 0.5], [1.0, 2.0, 3.0, 4.0])
    assert batch["rewards"].tolist() == [1, 2, 3, 4]
    assert np.array_equal(batch["raw_reward"], np.float32([np.nan, 0.5, 0.5, 0.5]), equal_nan=True)
    assert "rewards" not in Hooks().make_batch(config, four_samples(), None, None)


def test_a_convert_function_makes_the_batch(config):
    def own(config, samples):
        return train_data(samples, [3.0] * 4)

    batch = convert(own)(config, four_samples(), [1.0] * 4, [2.0] * 4)
    assert batch["rewards"].tolist() == [3.0] * 4 and batch["raw_reward"].tolist() == [1.0, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="--custom-convert-samples-to-train-data-path returned no rewards"):
        convert(lambda c, s: train_data(s, None))(config, four_samples(), [1.0] * 4, [2.0] * 4)


def test_log_functions_see_everything_and_may_leave_out_miles_metrics(config):
    seen = []

    def log(*arguments):
        seen.append(arguments)
        return seen and len(seen) > 1

    samples, metrics = four_samples(), {"rollout/rewards": 1.0}
    assert Hooks().log_rollout(config, 3, samples, metrics, 1.5) is False
    assert log_rollout(log)(config, 3, samples, metrics, 1.5) is False
    assert log_rollout(log)(config, 3, samples, metrics, 1.5) is True
    assert seen == [(3, config, samples, metrics, 1.5)] * 2
    seen.clear()
    assert Hooks().log_eval(config, 3, {}, metrics) is False
    assert log_eval(log)(config, 3, {"sums": samples}, metrics) is False
    assert log_eval(returning(None))(config, 3, {"sums": samples}, metrics) is False
    assert seen == [(3, config, {"sums": samples}, metrics)]
    with pytest.raises(ValueError, match="--custom-rollout-log-function-path returned 1 \\(int\\)"):
        log_rollout(returning(1))(config, 3, samples, metrics, 1.5)
