import pytest

from miles.config import data_rules
from miles.config.resolve import ConfigError, resolve

CASES = {
    "_prompts": [
        ({"prompt_data": None}, "--prompt-data is required"),
        ({"prompt_data": "none.jsonl"}, "--prompt-data none.jsonl is no file here; relative paths start at"),
        ({"prompt_data": "train.jsonl none.jsonl@[:5]"}, "--prompt-data none.jsonl@[:5] is no file here"),
        ({"prompt_data": "train.csv"}, "--prompt-data train.csv must be a .jsonl or .parquet file"),
        ({"prompt_data": "train.jsonl@[::2]"}, "--prompt-data train.jsonl@[::2]: [::2] must be [a:b]"),
    ],
    "_prompt_weights": [
        ({"prompt_data_weights": "1 2"}, "--prompt-data-weights has 2 weights for 1 files"),
        ({"prompt_data_weights": "-1"}, "--prompt-data-weights -1 must be above 0; leave out"),
        ({"prompt_data": "train.jsonl held_out.jsonl", "prompt_data_weights": "1 0"}, "weights 0 must be above 0"),
    ],
    "_chat_template": [
        ({"chat_template_path": "train.jsonl"}, "--chat-template-path without --apply-chat-template has no effect"),
        ({"apply_chat_template_kwargs": '{"a":1}'}, "--apply-chat-template-kwargs without --apply-chat-template has"),
        ({"apply_chat_template": "", "chat_template_path": "none.jinja"}, "--chat-template-path none.jinja is no file"),
        ({"apply_chat_template": "", "apply_chat_template_kwargs": '{"tokenize":1}'}, "tokenize is given by Miles"),
    ],
}


def test_the_table_has_every_rule():
    assert list(CASES) == [rule.__name__ for rule in data_rules.DATA_RULES]


@pytest.mark.parametrize(("changes", "message"), [case for cases in CASES.values() for case in cases])
def test_refused(argv, changes, message):
    with pytest.raises(ConfigError) as caught:
        resolve(argv(**changes))
    (problem,) = caught.value.problems
    assert message in problem


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_data": "train.jsonl@[-5:]"},
        {"prompt_data": "train.jsonl held_out.jsonl@[:10]", "prompt_data_weights": "0.5 2"},
        {"eval_interval": "1", "eval_prompt_data": "a held_out.jsonl@[:10] b held_out.jsonl@[10:]"},
        {
            "apply_chat_template": "",
            "apply_chat_template_kwargs": '{"enable_thinking":false}',
            "chat_template_path": "held_out.jsonl",
        },
    ],
)
def test_accepted(argv, changes):
    assert resolve(argv(**changes)).warnings == []


def test_one_file_in_yaml_needs_no_brackets(argv, folder):
    (folder / "run.yaml").write_text("prompt_data: train.jsonl\n")
    flags = argv("--config run.yaml", prompt_data=None)
    assert resolve(flags).config.prompt_data == [str(folder / "train.jsonl")]
    with pytest.raises(ConfigError, match="--rollout-batch-size"):
        resolve([*flags, "--rollout-batch-size", "0"])
