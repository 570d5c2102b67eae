"""The rules of evaluation, broken once each, what they allow, and what follows from what was given."""

import pytest

from miles.config.eval_rules import EVAL_RULES
from miles.config.multi_turn_rules import MULTI_TURN
from miles.config.resolve import ConfigError, resolve

DISTIL = {"use_opd": "", "opd_type": "megatron", "opd_teacher_load": "model", "rm_type": None}
CUSTOM = {"rm_type": None, "custom_rm_path": "my_module.reward"}
ONE = {"eval_interval": "2", "eval_prompt_data": "a held_out.jsonl"}
SFT = {"debug_train_only": "", "loss_type": "sft_loss", "n_samples_per_prompt": "1"}
CASES = {
    "_evaluation": [
        ({"eval_interval": "2"}, "--eval-interval 2 needs --eval-prompt-data NAME FILE, or --eval-config FILE"),
        (ONE | SFT, "--eval-interval 2 needs engines, and none runs in this layout"),
        ({"num_rollout": "0"}, "--num-rollout 0 only evaluates: it needs --eval-prompt-data NAME FILE, or --eval-con"),
        (ONE | {"num_rollout": "0", "eval_interval": None, "skip_eval_before_train": ""},
         "--num-rollout 0 only evaluates, and --skip-eval-before-train leaves that out; drop it"),
    ],
    "_lengths": [
        (ONE | {"eval_max_prompt_len": "9", "eval_max_context_len": "9"},
         "--eval-max-prompt-len 9 leaves no room for a response within --eval-max-context-len 9; at most 8 is allowed"),
        ({"rollout_max_prompt_len": "9", "eval_max_context_len": "5"},
         "--eval-max-prompt-len 9 leaves no room for a response within --eval-max-context-len 5"),
    ],
    "_sets": [
        ({"eval_prompt_data": "held_out.jsonl"}, "takes pairs NAME FILE, got 1 values: held_out.jsonl"),
        ({"eval_prompt_data": "a held_out.jsonl a train.jsonl"}, "--eval-prompt-data has the name a more than once"),
        ({"eval_prompt_data": "a/b held_out.jsonl"}, "--eval-prompt-data: set a/b: name is 'a/b': a name without"),
        ({"eval_prompt_data": "a none.jsonl"}, "--eval-prompt-data none.jsonl is no file here"),
        (ONE | DISTIL, "a needs a reward to evaluate with: give --rm-type or --custom-rm-path"),
        (ONE | {"eval_min_new_tokens": "17"}, "asks for responses of at least 17 tokens (min_new_tokens) and at mo"),
    ],
}  # fmt: skip
# What is wrong with one set of a file: its settings, the other flags, the message.
SETS = [
    ({"path": "none.jsonl"}, {}, "none.jsonl is no file here"),
    ({"path": "held_out.txt"}, {}, "held_out.txt must be a .jsonl or .parquet file"),
    ({"rm_type": "math"}, CUSTOM, "rm_type math has no effect, since --custom-rm-path is given; drop one of them"),
    ({"label_key": None}, {}, "--rm-type exact needs label_key (or --eval-label-key), the column with the right"),
    ({"label_key": None, "rm_type": "math"}, {}, "rm_type math needs label_key (or --eval-label-key)"),
    ({"rm_type": "math"}, {"rm_type": "reasoning_gym", "label_key": None}, "rm_type math needs label_key (or --eval-"),
    ({"rm_type": "remote_rm"}, {}, "rm_type remote_rm needs --rm-url, the address of its service"),
    ({"rm_type": "dapo"}, {}, "rm_type dapo gives score (1 or -1) and acc (1 or 0): choose one with --eval-reward-key"),
    (
        {"min_new_tokens": 5, "max_response_len": 4},
        {},
        "asks for responses of at least 5 tokens (min_new",
    ),
    ({"top_k": 0}, {}, "top_k is at least 1, or -1 for all tokens; 0 was given"),
    ({"custom_generate_function_path": "generate"}, {}, "custom_generate_function_path generate must be the dotted"),
    ({"custom_generate_function_path": MULTI_TURN}, {}, "multi_turn.generate needs --eval-max-context-len"),
    ({"temperatur": 0}, {}, "key temperatur is unknown; did you mean temperature?"),
]
ALLOWED_SETS = [
    ({}, {}),
    ({"rm_type": "reasoning_gym", "label_key": None}, {}),
    ({"rm_type": "math"}, DISTIL),
    ({"rm_type": "dapo"}, {"eval_reward_key": "acc"}),
    ({"custom_generate_function_path": "a.generate", "top_k": 5, "path": "held_out.jsonl@[:5]"}, CUSTOM),
    ({}, {"rm_type": "reasoning_gym", "label_key": None}),
]


@pytest.fixture
def with_set(folder, argv):
    """A command line with an evaluation set of these settings, in a file eval.yaml."""

    def build(settings, **changes):
        lines = {"name": "a", "path": "held_out.jsonl"} | settings
        (folder / "eval.yaml").write_text(f"datasets: [{lines}]".replace("None", "null"))
        return argv(**{"eval_config": "eval.yaml", "eval_interval": "2"} | changes)

    return build


def test_the_table_has_every_rule():
    assert list(CASES) == [rule.__name__ for rule in EVAL_RULES]


@pytest.mark.parametrize(("changes", "message"), [case for cases in CASES.values() for case in cases])
def test_broken_rule(argv, changes, message):
    with pytest.raises(ConfigError) as caught:
        resolve(argv(**changes))
    (problem,) = caught.value.problems
    assert message in problem


@pytest.mark.parametrize(("settings", "changes", "message"), SETS)
def test_a_set_of_the_file(with_set, settings, changes, message):
    with pytest.raises(ConfigError) as caught:
        resolve(with_set(settings, **changes))
    (problem,) = caught.value.problems
    assert problem.startswith("--eval-config eval.yaml: set a: ") and message in problem


@pytest.mark.parametrize(("settings", "changes"), ALLOWED_SETS)
def test_sets_that_are_allowed(with_set, settings, changes):
    assert resolve(with_set(settings, **changes)).warnings == []


def test_only_one_way_to_name_sets(with_set):
    with pytest.raises(ConfigError) as caught:
        resolve(with_set({}, eval_prompt_data="a held_out.jsonl"))
    assert caught.value.problems == [
        "--eval-config eval.yaml and --eval-prompt-data are two ways to name evaluation sets; give one"
    ]


@pytest.mark.parametrize(
    "changes",
    [
        ONE | {"eval_prompt_data": "a held_out.jsonl b train.jsonl", "eval_temperature": "0", "log_passrate": ""},
        ONE | {"eval_interval": None, "num_rollout": "0"},
        {"eval_interval": "2", "eval_function_path": "my_module.evaluate"},
        ONE | DISTIL | {"rm_type": "exact"},
    ],
)
def test_accepted(argv, changes):
    assert resolve(argv(**changes)).warnings == []


def test_sets_that_are_never_used(argv, folder, with_set):
    expected = ["--eval-config is never used: --eval-interval is not given"]
    assert resolve(with_set({}, eval_interval=None)).warnings == expected
    given = {"eval_prompt_data": "a held_out.jsonl"}
    assert resolve(argv(**given)).warnings == ["--eval-prompt-data is never used: --eval-interval is not given"]
    for name in ("eval_function_path", "custom_eval_rollout_log_function_path"):
        flag = "--" + name.replace("_", "-")
        warnings = resolve(argv(**{name: "my_module.function"})).warnings
        assert warnings == [f"{flag} is never used: --eval-interval is not given"]
    assert resolve(argv(**given, **DISTIL)).config.eval_prompt_data == ["a", str(folder / "held_out.jsonl")]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (None, None, "tools")),
        ({"rollout_max_context_len": "100"}, (None, 100, "tools")),
        ({"rollout_max_context_len": "100", "rollout_max_prompt_len": "20"}, (20, 100, "tools")),
        ({"rollout_max_context_len": "100", "eval_max_context_len": "200"}, (None, 200, "tools")),
        ({"rollout_max_prompt_len": "20", "eval_max_prompt_len": "30", "tool_key": "t"}, (30, None, "t")),
        ({"tool_key": "t", "eval_tool_key": "u"}, (None, None, "u")),
    ],
)
def test_what_follows(argv, given, expected):
    config = resolve(argv(**given)).config
    assert (config.eval_max_prompt_len, config.eval_max_context_len, config.eval_tool_key) == expected
