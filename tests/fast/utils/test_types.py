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
