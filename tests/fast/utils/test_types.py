import copy
import json

import numpy as np
import pytest

from miles.utils.types import Sample


def test_prompt_length_counts_tokens_before_the_response():
    assert Sample(tokens=[1, 2, 3, 4, 5], response_length=2).prompt_length == 3
    assert Sample(tokens=[1, 2, 3]).prompt_length == 3


def test_a_sample_is_a_trajectory_of_its_own_or_a_piece_of_one():
    assert Sample(index=4).trajectory == 4
    assert Sample(index=4, rollout_id=0).trajectory == 0


@pytest.mark.parametrize(
    "parts",
    [
        {"response_length": 4},
        {"response_length": -1},
        {"response_length": 2, "loss_mask": [1]},
        {"response_length": 1, "rollout_log_probs": [-0.5, -0.5]},
        {"response_length": 2, "teacher_log_probs": [-0.5]},
        {"response_length": 2, "weight_versions": ["1"], "weight_version_lengths": [1, 1]},
        {"response_length": 2, "weight_versions": ["1", "2"], "weight_version_lengths": [1, 2]},
    ],
)
def test_validate_refuses_lengths_that_contradict(parts):
    with pytest.raises(ValueError, match="sample 7 of group 3"):
        Sample(index=7, group_index=3, tokens=[1, 2, 3], **parts).validate()


def test_samples_share_no_lists():
    a, b = Sample(), Sample()
    a.tokens.append(1)
    a.metadata["x"] = 1
    assert b.tokens == [] and b.metadata == {}
    a.validate()


def full_sample():
    return Sample(
        group_index=3,
        index=7,
        rollout_id=5,
        prompt=[{"role": "user", "content": "2^64 \u00e4 \u6f22"}],
        tokens=[1, 2, 3, 4, 5, 6],
        response="ab",
        response_length=4,
        label="18446744073709551617",
        reward=0.1,
        loss_mask=[1, 1, 0, 1],
        weight_versions=["9", "10"],
        weight_version_lengths=[2, 2],
        rollout_log_probs=[-0.1, -1e-30, 0.0, -3.0000000000000004],
        teacher_log_probs=[-0.5, -0.25, -0.125, -0.0],
        remove_sample=True,
        status=Sample.Status.ABORTED,
        metadata={"big": 2**70, "nested": [{"a": None}]},
    )


@pytest.mark.parametrize("sample", [full_sample(), Sample()])
def test_a_sample_survives_json(sample):
    again = Sample.from_dict(json.loads(json.dumps(sample.to_dict())))
    assert again == sample and type(again.status) is Sample.Status
    assert vars(sample).keys() == sample.to_dict().keys()


def test_what_is_no_sample_is_refused_by_name():
    with pytest.raises(ValueError, match="a sample has no 'colour', 'size'"):
        Sample.from_dict({"tokens": [1], "size": 3, "colour": 2})
    with pytest.raises(ValueError, match=r"a sample is a dict, not \[1, 2\]"):
        Sample.from_dict([1, 2])
    with pytest.raises(ValueError, match="'done' is not a valid .*Status"):
        Sample.from_dict({"status": "done"})


def test_reset_leaves_the_prompt_and_copies_alone():
    sample = full_sample()
    before, shallow = copy.deepcopy(sample), copy.copy(sample)
    sample.reset_for_retry()
    assert sample == Sample(
        group_index=3,
        index=7,
        rollout_id=5,
        prompt=before.prompt,
        tokens=[1, 2],
        label=before.label,
        metadata=before.metadata,
    )
    assert shallow == before
    sample.validate()


def test_what_is_set_is_converted_and_checked():
    sample = Sample(index=7, tokens=(1, 2, 3), loss_mask=np.array([True, False]), response_length=2)
    assert sample.tokens == [1, 2, 3] and sample.loss_mask == [1, 0] and sample.rollout_log_probs is None
    assert [sample.tokens.array.dtype, sample.loss_mask.array.dtype] == [np.int32, np.int8]
    sample.tokens += [4]
    sample.loss_mask.append(1)
    assert sample.tokens == [1, 2, 3, 4] and sample.loss_mask == [1, 0, 1]
    for name, value, words in (
        (
            "tokens",
            [1, 2**31],
            r"sample 7: tokens = \[1, 2147483648\] \(list\); it must be a list of integers from -2",
        ),
        ("tokens", None, "sample 7: tokens = None"),
        ("loss_mask", [0.5], r"sample 7: loss_mask = \[0.5\].* integers from -128 to 127"),
        ("rollout_log_probs", ["a"], r"\['a'\] \(list\); it must be a list of numbers$"),
        ("teacher_log_probs", -1.0, "-1.0"),
    ):
        with pytest.raises(ValueError, match=words):
            setattr(sample, name, value)
    assert sample.tokens == [1, 2, 3, 4]


def test_no_mask_is_a_mask_of_ones():
    sample = Sample(tokens=[1, 2, 3], response_length=2)
    assert sample.mask.tolist() == [1, 1] and sample.trained_length == 2
    sample.loss_mask = [0, 1]
    assert sample.mask.tolist() == [0, 1] and sample.trained_length == 1


def test_what_is_cut_off_is_not_finished():
    finished = {status for status in Sample.Status if Sample(status=status).is_finished}
    assert finished == {Sample.Status.COMPLETED, Sample.Status.TRUNCATED, Sample.Status.FAILED}


def test_context_is_not_trained_on():
    sample = full_sample()
    sample.teacher_log_probs, shallow = None, copy.copy(sample)
    sample.append_context([7, 8])
    sample.validate()
    assert sample.tokens == [1, 2, 3, 4, 5, 6, 7, 8] and sample.prompt_length == 2
    assert sample.loss_mask == [1, 1, 0, 1, 0, 0] and sample.rollout_log_probs[4:] == [0.0, 0.0]
    assert sample.trained_token_versions() == ["9", "9", None, "10", None, None]
    shallow.validate()

    plain = Sample(tokens=[1, 2], response_length=1)
    plain.append_context([3])
    assert (plain.loss_mask, plain.rollout_log_probs) == ([1, 0], [0.0, 0.0])


def test_versions_of_tokens_without_a_mask():
    sample = Sample(tokens=[1, 2, 3], response_length=3, weight_versions=["4"], weight_version_lengths=[2])
    assert sample.trained_token_versions() == ["4", "4", None]


def test_the_oldest_version_is_a_number():
    assert Sample(weight_versions=["10", "9", "default"]).oldest_weight_version == 9
    assert Sample(weight_versions=["default"]).oldest_weight_version is None
    assert Sample().oldest_weight_version is None
