import json

import pytest

from miles.rollout.sample_buffer import SampleBuffer, is_stale, trajectories
from miles.utils.types import Sample


def sample(index, versions=(), **fields):
    count = len(versions)
    return Sample(
        group_index=index // 2,
        index=index,
        tokens=[1, 2, *range(count)],
        response_length=count,
        loss_mask=[1] * count,
        rollout_log_probs=[-0.1] * count,
        weight_versions=list(versions),
        weight_version_lengths=[1] * count,
        **fields,
    )


def test_a_state_is_a_copy_that_comes_back_whole():
    buffer = SampleBuffer()
    buffer.finished.append([sample(0, "1", reward=0.5, status=Sample.Status.COMPLETED), sample(1, "1")])
    buffer.unfinished.append([sample(2, "12", status=Sample.Status.ABORTED), sample(3, metadata={"a": [1]})])
    kept, running = [sample(4), sample(5)], [sample(6, "1"), sample(7)]
    state = buffer.state_dict([kept], [running])
    expected = json.loads(json.dumps(state))
    for changed in (buffer.finished[0][0], buffer.unfinished[0][0], running[0]):
        changed.reset_for_retry()
    buffer.unfinished[0][1].metadata["a"].append(2)
    assert state == expected

    other = SampleBuffer()
    other.load_state_dict(expected, samples_per_prompt=2)
    assert len(other) == 4
    assert [group[0].index for group in other.finished] == [4, 0]
    assert [group[0].index for group in other.unfinished] == [6, 2]
    assert other.unfinished[1] == [sample(2, "12", status=Sample.Status.ABORTED), sample(3, metadata={"a": [1]})]


def test_groups_of_another_size_are_refused():
    buffer = SampleBuffer()
    buffer.unfinished.append([sample(0), sample(1)])
    state = buffer.state_dict([], [])
    with pytest.raises(ValueError, match="groups of 2 samples that wait .* --n-samples-per-prompt is 4"):
        SampleBuffer().load_state_dict(state, samples_per_prompt=4)


def test_pieces_are_one_trajectory():
    pieces = [sample(0, rollout_id=0), sample(0, rollout_id=0), sample(1)]
    assert [len(part) for part in trajectories(pieces)] == [2, 1]
    buffer = SampleBuffer()
    buffer.load_state_dict({"finished": [[piece.to_dict() for piece in pieces]], "unfinished": []}, 2)


def test_asked_again_a_group_has_its_prompts_only():
    buffer = SampleBuffer()
    buffer.ask_again([sample(0, "12", reward=1.0, status=Sample.Status.COMPLETED), sample(1, "1", remove_sample=True)])
    assert buffer.unfinished == [[Sample(group_index=0, index=index, tokens=[1, 2]) for index in (0, 1)]]


@pytest.mark.parametrize(
    ("version", "limit", "stale"),
    [(5, 1, True), (5, 2, False), (5, None, False), (None, 0, False)],
)
def test_the_oldest_token_of_a_group_decides(version, limit, stale):
    assert is_stale([sample(0, "5"), sample(1, "34")], version, limit) is stale


def test_a_version_that_is_no_number_is_not_stale():
    assert not is_stale([sample(0, ["default"]), sample(1)], 7, 0)
