"""Precedence, provenance and the collection of problems."""

import pickle

import pytest

from miles.config.resolve import ConfigError, resolve


def problems_of(argv):
    with pytest.raises(ConfigError) as caught:
        resolve(argv)
    return caught.value.problems


def test_command_line_over_yaml_over_default(argv, folder):
    (folder / "run.yaml").write_text("lr: 1e-4\nseed: 7\nrollout_stop: [a, b]\nsglang_mem_fraction_static: 0.3\n")
    resolved = resolve(argv("--config run.yaml --seed 8 --sglang-log-level info"))
    config, origins = resolved.config, resolved.provenance
    assert (config.lr, config.seed, config.weight_decay) == (1e-4, 8, 0.01)
    assert config.rollout_stop == ["a", "b"]
    assert config.sglang == {"mem_fraction_static": 0.3, "log_level": "info"}
    assert origins["lr"] == "YAML (run.yaml)"
    assert origins["seed"] == "command line"
    assert origins["weight_decay"] == "default"
    assert origins["bf16"] == "derived: --device cpu"
    assert origins["sglang_mem_fraction_static"] == "YAML (run.yaml)"
    assert origins["sglang_log_level"] == "command line"


def test_a_file_that_is_laid_over_the_command_line(argv, folder):
    """As Miles' --custom-config-path; it says where it changes something."""
    (folder / "below.yaml").write_text("lr: 1.0e-3\nseed: 5\n")
    (folder / "above.yaml").write_text("use_tis: true\ntis_clip: 3\nlr: 2.0e-6\nsglang_log_level: debug\n")
    files = "--config below.yaml --custom-config-path above.yaml"
    resolved = resolve(argv(f"{files} --lr 1e-6 --tis-clip 3 --sglang-log-level info"))
    config = resolved.config
    assert (config.use_tis, config.tis_clip, config.lr, config.seed) == (True, 3.0, 2e-6, 5)
    assert config.sglang == {"log_level": "debug"}
    assert resolved.provenance["lr"] == "YAML (above.yaml)" and resolved.provenance["seed"] == "YAML (below.yaml)"
    said = "--custom-config-path has other values than the command line, and its values count: --lr, --sglang-log-level"
    assert resolved.warnings == [said]
    assert "--lr" not in str(resolve(argv("--custom-config-path above.yaml --tis-clip 3")).warnings)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("tis_clipp: 3", "above.yaml: key tis_clipp is unknown; did you mean tis_clip"),
        ("[1]", "--custom-config-path above"),
    ],
)
def test_a_bad_file_over_the_command_line(argv, folder, text, expected):
    (folder / "above.yaml").write_text(text)
    with pytest.raises(ConfigError, match=expected):
        resolve(argv("--custom-config-path above.yaml"))


def test_yaml_is_laid_down_before_anything_is_derived_or_checked(argv, folder):
    (folder / "run.yaml").write_text("n_samples_per_prompt: 6\nno_save_optim: true\n")
    resolved = resolve(argv("--config run.yaml --save-optim", n_samples_per_prompt=None))
    assert resolved.config.global_batch_size == 48
    assert resolved.provenance["global_batch_size"] == "derived: one optimizer step per rollout"
    assert resolved.config.no_save_optim is False


def test_every_value_has_an_origin(argv):
    resolved = resolve(argv())
    assert set(resolved.provenance) == set(type(resolved.config).model_fields) - {"sglang"}


def test_all_problems_at_once(argv, folder):
    (folder / "run.yaml").write_text("sed: 3\nlr: fast\nsglang_mem_fraction: 1\n")
    more = "--config run.yaml --rollout-batch 3 --optimizer sgd --save-interval 2 --rollout-top-p 2"
    more += " --recompute-method block"
    problems = problems_of(argv(more, hf_checkpoint=None, rm_type=None))
    for expected in (
        "run.yaml: key sed is unknown; did you mean seed",
        "YAML (run.yaml): lr is 'fast': input should be a valid number",
        "YAML (run.yaml): sglang_mem_fraction is unknown to the installed SGLang; did you mean --sglang-mem-fraction",
        "--rollout-batch is unknown; did you mean --rollout-batch-size",
        "--optimizer sgd is not possible here: Adam is the only optimizer",
        "--save-interval 2 has no effect without --save",
        "--recompute-method block has no effect without --recompute-granularity full; add that, or drop it",
        "--rollout-top-p is '2': input should be less than or equal to 1",
        "--hf-checkpoint is required",
        "exactly one of --rm-type and --custom-rm-path must be given, neither is",
    ):
        assert sum(expected in problem for problem in problems) == 1, (expected, problems)
    assert len(problems) == 10


def test_a_wrong_value_is_reported_once_and_not_what_follows_from_it(argv):
    (problem,) = problems_of(argv(rollout_batch_size="many", global_batch_size="7"))
    assert problem.startswith("--rollout-batch-size is 'many'")


@pytest.mark.parametrize(
    ("yaml_text", "expected"),
    [
        ("seed: 1\nseed: 2\n", "key 'seed' is given twice"),
        ("rollout-batch-size: 4\n", "key rollout-batch-size is unknown; did you mean rollout_batch_size"),
        ("config: other.yaml\n", "key config is unknown"),
        ("print_config: true\n", "key print_config is unknown"),
        ("- seed\n", "must hold `name: value` lines, got a list"),
        ("seed: [1\n", "is not valid YAML"),
        ("num_epoch: true\n", "num_epoch is True: a number is needed here"),
        ("seed: null\n", "seed is None: input should be a valid integer"),
        ("rollout_stop_token_ids: [1, x]\n", "rollout_stop_token_ids[1] is 'x'"),
        ("rollout_stop: [a, '']\n", "rollout_stop is ['a', '']: an empty text ends every response at its"),
    ],
)
def test_bad_yaml(argv, folder, yaml_text, expected):
    (folder / "run.yaml").write_text(yaml_text)
    (problem,) = problems_of(argv("--config run.yaml"))
    assert expected in problem


def test_missing_yaml(argv):
    (problem,) = problems_of(argv("--config nowhere.yaml"))
    assert problem == "--config nowhere.yaml cannot be read: No such file or directory"


def test_paths_in_yaml_are_relative_to_the_working_directory(argv, folder):
    (folder / "configs").mkdir()
    (folder / "configs" / "run.yaml").write_text("prompt_data: train.jsonl\n")
    assert resolve(argv("--config configs/run.yaml", prompt_data=None)).config.prompt_data == [
        str(folder / "train.jsonl")
    ]


def test_frozen_picklable_and_changed_by_copy(argv):
    config = resolve(argv()).config
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.model_copy(update={"num_rollout": 9}).num_rollout == 9
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3


def test_warnings(argv):
    assert resolve(argv()).warnings == []
    more = "--use-kl-loss --kl-loss-coef 0.1 --eval-prompt-data a held_out.jsonl --lr 0"
    warnings = resolve(argv(more)).warnings
    assert len(warnings) == 3
    for expected in ("k1 as a loss has a gradient of zero on average", "--eval-interval", "--lr 0: the weights"):
        assert sum(expected in warning for warning in warnings) == 1
