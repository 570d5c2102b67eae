from transformers import AutoTokenizer

from miles.rollout.evaluate import EvaluationSets
from miles.utils.arguments import parse_args


def test_sets_are_fresh_and_numbered_within_themselves(engine_flags, tiny_checkpoint, prompt_file, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text('{"input": "xy", "label": "z"}\n')
    pairs = ["--eval-prompt-data", "letters", str(prompt_file), "other", str(other)]
    config = parse_args([*engine_flags, "--eval-interval", "1", *pairs, "--n-samples-per-eval-prompt", "3"])
    sets = EvaluationSets(config, AutoTokenizer.from_pretrained(tiny_checkpoint))
    groups = sets.groups()
    assert list(groups) == ["letters", "other"]
    assert [len(group) for group in groups["letters"]] == [3] * 8
    assert [sample.index for group in groups["letters"] for sample in group] == list(range(24))
    assert groups["letters"][1][0].tokens == [97, 98] and groups["letters"][1][0].label == "1"
    groups["other"][0][0].tokens.append(1)
    assert sets.groups()["other"][0][0].tokens == [120, 121]


def test_sets_are_read_like_prompts_to_train_on(engine_flags, tiny_checkpoint, prompt_file, caplog):
    pairs = ["--eval-prompt-data", "long", f"{prompt_file}@[-6:]", "--rollout-max-prompt-len", "6"]
    config = parse_args([*engine_flags, "--eval-interval", "1", *pairs])
    groups = EvaluationSets(config, AutoTokenizer.from_pretrained(tiny_checkpoint)).groups()
    assert [group[0].prompt for group in groups["long"]] == ["abcdefgh"[:i] for i in (3, 4, 5, 6)]
    assert "prompts.jsonl@[-6:]: left out 2 of 6 prompts of more than 6 tokens" in caplog.text
