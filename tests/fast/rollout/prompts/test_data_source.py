import json
import shutil
from collections import Counter

import pytest

from miles.rollout.prompts.data_source import RolloutDataSource
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


@pytest.fixture
def capitals(tmp_path):
    """Three prompts, in a second file."""
    path = tmp_path / "capitals.jsonl"
    path.write_text("".join(json.dumps({"input": letter, "label": "x"}) + "\n" for letter in "ABC"))
    return str(path)


def test_several_files_are_one_set_of_prompts(source, prompt_file, capitals):
    data = source(prompt_data=[str(prompt_file), f"{capitals}@[1:]"])
    assert len(data) == 10 and data.longest_prompt == 8
    letters = ["abcdefgh"[: i + 1] for i in range(8)]
    assert prompts(data.get_samples(13)) == [*letters, "B", "C", *letters[:3]]
    shuffled = prompts(source(prompt_data=[str(prompt_file), capitals], rollout_shuffle=True).get_samples(11))
    assert sorted(shuffled) == sorted([*letters, *"ABC"])
    assert not set("ABC") <= set(shuffled[:3]) and not set("ABC") <= set(shuffled[-3:])


def test_weights_are_shares_of_the_prompts(source, prompt_file, capitals):
    mixed = dict(prompt_data=[capitals, str(prompt_file)], prompt_data_weights=[6.0, 5.0])
    for shuffle in (False, True):
        drawn = prompts(source(rollout_shuffle=shuffle, **mixed).get_samples(33))
        counts = Counter(drawn)
        assert sum(counts[letter] for letter in "ABC") == 18
        assert {counts[letter] for letter in "ABC"} == {6} and {counts[word] for word in counts if word.islower()} <= {
            1,
            2,
        }
    with pytest.raises(ValueError, match="--prompt-data-weights: .*capitals.jsonl gets none of the 11 prompts"):
        source(prompt_data=[str(prompt_file), capitals], prompt_data_weights=[1000, 1])


@pytest.mark.parametrize("weights", [None, [2.0, 5.0]])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("consumed", [0, 3, 8, 23])
def test_resume_continues_with_exactly_the_same_groups(source, prompt_file, capitals, consumed, shuffle, weights):
    changes = dict(rollout_shuffle=shuffle, prompt_data=[str(prompt_file), capitals], prompt_data_weights=weights)
    straight = source(**changes)
    straight.get_samples(consumed)
    state = json.loads(json.dumps(straight.state_dict()))
    resumed = source(**changes)
    resumed.load_state_dict(state)
    assert resumed.get_samples(17) == straight.get_samples(17)
    assert resumed.state_dict() == straight.state_dict()


def test_a_changed_file_is_named(source, tmp_path, prompt_file, capitals):
    state = source(prompt_data=[str(prompt_file), capitals]).state_dict()
    moved = tmp_path / "moved.jsonl"
    shutil.copy(prompt_file, moved)
    source(prompt_data=[str(moved), capitals]).load_state_dict(state)
    for change in (b'{"input": "new", "label": "0"}\n' + moved.read_bytes(), moved.read_bytes().replace(b"7", b"6")):
        moved.write_bytes(change)
        with pytest.raises(
            ValueError, match="saved position belongs to other data: .*moved.jsonl has SHA-256"
        ) as error:
            source(prompt_data=[str(moved), capitals]).load_state_dict(state)
        assert "capitals" not in str(error.value)


def test_what_else_moves_the_position_is_refused(source, prompt_file, capitals):
    files = [str(prompt_file), capitals]
    state = source(rollout_shuffle=True, prompt_data=files).state_dict()
    for changes, message in [
        (dict(rollout_seed=1), "--rollout-shuffle and --rollout-seed were 42 and are 1"),
        (dict(rollout_shuffle=False), "--rollout-seed were 42 and are None"),
        (dict(prompt_data=files[:1]), "--prompt-data had 2 files and has 1"),
        (dict(prompt_data=files[::-1]), r"capitals.jsonl has SHA-256 .*; .*prompts.jsonl has SHA-256"),
        (dict(prompt_data=[f"{files[0]}@[1:]", capitals]), r"prompts.jsonl@\[1:\] gives 7 prompts and .* gave 8"),
        (dict(rollout_max_prompt_len=6), "prompts.jsonl gives 6 prompts and .* gave 8"),
        (dict(prompt_data_weights=[1.0, 2.0]), r"--prompt-data-weights were None and are \[1.0, 2.0\]"),
    ]:
        changed = source(**{"rollout_shuffle": True, "prompt_data": files, **changes})
        with pytest.raises(ValueError, match=f"saved position belongs to other data: .*{message}"):
            changed.load_state_dict(state)


def test_prompts_leave_room_in_the_context(source, caplog):
    assert len(source(rollout_max_context_len=9)) == 8 and not caplog.records
    data = source(rollout_max_context_len=8)
    assert len(data) == 7 and data.longest_prompt == 7
    assert "left out 1 of 8 prompts of more than 7 tokens; the first, " in caplog.text
    assert len(source(rollout_max_context_len=8, rollout_max_prompt_len=5)) == 5
    with pytest.raises(ValueError, match="has only prompts of more than 0 tokens"):
        source(rollout_max_context_len=1)


def test_the_template_of_a_file(source, tmp_path):
    template = tmp_path / "plain.jinja"
    template.write_text("<{{ messages[0].content }}é>", encoding="utf-8")
    data = source(apply_chat_template=True, chat_template_path=str(template))
    assert prompts(data.get_samples(2)) == ["<aé>", "<abé>"]


def test_columns_are_those_of_the_configuration(source, tmp_path):
    path = tmp_path / "columns.jsonl"
    row = {"q": "a", "answer": 7, "more": {"x": 1}, "functions": [{"name": "f"}]}
    path.write_text(json.dumps(row))
    columns = dict(input_key="q", label_key="answer", metadata_key="more", tool_key="functions")
    template = tmp_path / "tools.jinja"
    template.write_text("{{ tools | tojson }}{{ messages[0].content }}")
    changes = dict(prompt_data=[str(path)], apply_chat_template=True, chat_template_path=str(template), **columns)
    sample = source(**changes).get_samples(1)[0][0]
    assert sample.prompt == '[{"name": "f"}]a' and sample.label == "7"
    assert sample.metadata == {"x": 1, "tools": [{"name": "f"}]}
