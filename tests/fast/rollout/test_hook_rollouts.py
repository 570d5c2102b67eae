"""--rollout-function-path, --eval-function-path, --custom-generate-function-path: what they return is checked."""

import threading

import numpy as np
import pytest

from miles.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from miles.rollout.hooks import Hooks, generate_pieces, run_eval, run_rollout
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
        output = await run_rollout(Hooks(rollout=awaited(function)), config, 7, "data")
        assert [len(group) for group in output.samples] == [2, 2] and output.metrics == {"mine/rounds": 3.0}
    assert called == [(7, "data", False, False), (7, "data", False, True)]


async def test_a_rollout_may_be_the_groups_alone(config):
    output = await run_rollout(Hooks(rollout=awaited(returning(tuple(map(tuple, two_groups()))))), config, 0, None)
    assert output.metrics == {} and [[s.index for s in group] for group in output.samples] == [[0, 1], [2, 3]]


async def test_pieces_of_a_trajectory_count_once(config):
    groups = two_groups()
    groups[0].append(finished(1, 0, 0.0, rollout_id=1))
    groups[0][1].rollout_id = 1
    output = await run_rollout(Hooks(rollout=awaited(returning(groups))), config, 0, None)
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
        await run_rollout(Hooks(rollout=awaited(returning(result))), config, 0, None)
    assert message in str(caught.value)


async def test_an_evaluation(config):
    async def evaluate(config, rollout_id, data_source, evaluation=False):
        assert evaluation and rollout_id == 3
        return RolloutFnEvalOutput({"sums": four_samples()}, {"mine/score": np.float32(0.5)})

    output = await run_eval(Hooks(eval=awaited(evaluate)), config, 3, None)
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
        await run_eval(Hooks(eval=awaited(returning(result))), config, 0, None)
    assert str(caught.value).startswith("--eval-function-path") and message in str(caught.value)


# One sample, one group


async def test_pieces_get_the_identity_of_their_sample(config):
    async def fans_out(config, sample, sampling_params):
        return [finished(None, None), finished(77, 5)]

    sample = Sample(group_index=4, index=12, tokens=[1, 2])
    pieces = await generate_pieces(fans_out, config, sample, {})
    assert [(piece.group_index, piece.index, piece.rollout_id) for piece in pieces] == [(4, 12, 12)] * 2


async def test_one_sample_stays_as_it_is(config):
    async def completes(config, sample, sampling_params):
        sample.status = Sample.Status.ABORTED
        sample.reward = np.float32(0.5)
        return sample

    sample = Sample(group_index=4, index=12, tokens=[1, 2])
    (piece,) = await generate_pieces(completes, config, sample, {})
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
        (finished(0, 0, tokens=[1, 2, object(), 4]), "tokens of sample 12 of group 4[2] is <object"),
        (
            finished(0, 0, status="done"),
            "the status of sample 12 of group 4 is 'done' (str); it must be one of pending",
        ),
        (finished(0, 0, rollout_log_probs=[0.0]), "rollout_log_probs has 1 entries for a response of 2 tokens"),
    ],
)
async def test_refused_generations(config, result, message):
    async def generate(config, sample, sampling_params):
        return result

    with pytest.raises(ValueError) as caught:
        await generate_pieces(generate, config, Sample(group_index=4, index=12, tokens=[1, 2]), {})
    assert message in str(caught.value)
