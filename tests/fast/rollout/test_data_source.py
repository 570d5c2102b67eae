import json

import pytest

from miles.rollout.data_source import RolloutDataSource
from miles.tools.make_tiny_checkpoint import byte_tokenizer

TOKENIZER = byte_tokenizer()


@pytest.fixture
def source(engine_config):
    def build(**changes):
        return RolloutDataSource(engine_config.model_copy(update=changes), TOKENIZER)

    return build


def prompts(groups):
    return [group[0].prompt for group in groups]


def test_groups_have_samples_of_their_own_and_running_numbers(source):
    groups = source().get_samples(3)
    assert [[sample.group_index for sample in group] for group in groups] == [[0] * 4, [1] * 4, [2] * 4]
    assert [sample.index for group in groups for sample in group] == list(range(12))
    groups[0][0].tokens.append(1)
    groups[0][0].metadata["x"] = 1
    assert groups[0][1].tokens == list(b"a") and groups[0][1].metadata == {}


@pytest.mark.parametrize("shuffle", [False, True])
def test_epochs_lose_and_repeat_nothing(source, shuffle):
    data = source(rollout_shuffle=shuffle)
    assert len(data) == 8
    drawn = [prompt for _ in range(8) for prompt in prompts(data.get_samples(3))]
    epochs = [drawn[i : i + 8] for i in range(0, 24, 8)]
    assert all(sorted(epoch) == sorted("abcdefgh"[: i + 1] for i in range(8)) for epoch in epochs)
    assert (epochs[0] == epochs[1]) == (not shuffle)
    assert len(prompts(source(rollout_shuffle=shuffle).get_samples(20))) == 20


def test_a_seed_gives_one_order(source):
    first, again = (prompts(source(rollout_shuffle=True).get_samples(16)) for _ in range(2))
    assert first == again
    assert first != prompts(source(rollout_shuffle=True, rollout_seed=43).get_samples(16))


@pytest.mark.parametrize("consumed", [0, 3, 8, 13])
def test_resume_continues_with_exactly_the_same_groups(source, consumed):
    straight = source(rollout_shuffle=True)
    straight.get_samples(consumed)
    state = json.loads(json.dumps(straight.state_dict()))
    resumed = source(rollout_shuffle=True)
    resumed.load_state_dict(state)
    assert resumed.get_samples(11) == straight.get_samples(11)
    assert resumed.state_dict() == straight.state_dict()


def test_changed_data_or_order_is_refused(source, tmp_path, prompt_file):
    state = source(rollout_shuffle=True).state_dict()
    changed = tmp_path / "changed.jsonl"
    changed.write_text('{"input": "new", "label": "0"}\n' + prompt_file.read_text())
    with pytest.raises(ValueError, match="saved position belongs to other data"):
        source(rollout_shuffle=True, prompt_data=changed).load_state_dict(state)
    with pytest.raises(ValueError, match="--rollout-seed"):
        source(rollout_shuffle=True, rollout_seed=1).load_state_dict(state)


def test_prompts_must_leave_room_in_the_context(source):
    source(rollout_max_context_len=9)
    with pytest.raises(ValueError, match=r"prompts.jsonl:8: the prompt has 8 tokens; at most 7"):
        source(rollout_max_context_len=8)
    with pytest.raises(ValueError, match=r"jsonl:6: the prompt has 6 tokens; at most 5"):
        source(rollout_max_prompt_len=5)
