"""What the lexer makes of words, before types."""

import pytest

from miles.config.command_line import read_command_line


def test_kinds_of_values():
    line = read_command_line(
        ["--lr", "1e-3", "--rollout-top-k=-1", "--rollout-stop", "a", "b c", "--rollout-stop-token-ids=1", "2"]
        + ["--colocate", "--no-use-tensorboard", "--no-save-optim", "--apply-chat-template-kwargs", '{"a": [1]}']
        + ["--sglang-mem-fraction-static", "0.3", "--sglang-disable-cuda-graph", "--no-sglang-enable-metrics"]
    )
    assert line.problems == []
    assert line.values == {
        "lr": "1e-3",
        "rollout_top_k": "-1",
        "rollout_stop": ["a", "b c"],
        "rollout_stop_token_ids": ["1", "2"],
        "colocate": True,
        "use_tensorboard": False,
        "no_save_optim": True,
        "apply_chat_template_kwargs": {"a": [1]},
    }
    assert line.sglang == {"mem_fraction_static": ["0.3"], "disable_cuda_graph": True, "enable_metrics": False}


@pytest.mark.parametrize("name", ["colocate", "use-tensorboard", "offload", "offload-train", "offload-rollout"])
def test_switches_go_both_ways(name):
    assert read_command_line([f"--{name}"]).values == {name.replace("-", "_"): True}
    assert read_command_line([f"--no-{name}"]).values == {name.replace("-", "_"): False}


def test_a_negative_name_is_negated_by_the_positive_one():
    assert read_command_line(["--no-load-optim"]).values == {"no_load_optim": True}
    assert read_command_line(["--load-optim"]).values == {"no_load_optim": False}


def test_a_list_with_a_default_is_emptied_by_no_value():
    line = read_command_line(["--offload-rollout-level", "--colocate"])
    assert (line.values, line.problems) == ({"offload_rollout_level": [], "colocate": True}, [])


def test_nothing():
    assert read_command_line([]).problems == []


def test_own_flags():
    line = read_command_line(["--config", "a.yaml", "--print-config", "-h"])
    assert (line.config_file, line.print_config, line.help, line.problems) == ("a.yaml", True, True, [])


@pytest.mark.parametrize(
    ("words", "repeated"),
    [
        ("--lr 1 --lr 1", ""),
        ("--lr 1 --lr=2", "--lr 1 (--lr 2)"),
        ("--lr --lr 2", "--lr (--lr 2)"),
        ("--lr 3 --lr 1 --lr 2", "--lr 3 (--lr 1), --lr 1 (--lr 2)"),
        ("--colocate --no-colocate", "--colocate (--no-colocate)"),
        ("--save-optim --no-save-optim", "--save-optim (--no-save-optim)"),
        ("--sglang-dtype a --sglang-dtype b", "--sglang-dtype a (--sglang-dtype b)"),
        ("--sglang-enable-metrics --no-sglang-enable-metrics", "--sglang-enable-metrics (--no-sglang-enable-metrics)"),
        ("--config a --config b", "--config a (--config b)"),
        ("--num-layers 1 --num-layers 2", "--num-layers 1 (--num-layers 2)"),
        ("--tis-threshold 2 --tis-clip 3", "--tis-clip 2 (--tis-clip 3)"),
    ],
)
def test_the_last_of_several_counts(words, repeated):
    line, last = read_command_line(words.split()), read_command_line(f"--{words.rpartition('--')[2]}".split())
    assert (line.problems, ", ".join(line.repeated)) == ([], repeated)
    assert (line.values, line.sglang, line.upstream) == (last.values, last.sglang, last.upstream)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--rollout-batch 3", "--rollout-batch is unknown; did you mean --rollout-batch-size"),
        ("--rollout_batch_size 3", "--rollout_batch_size is unknown; did you mean --rollout-batch-size"),
        ("--colo", "--colo is unknown"),
        ("--no-lr", "--no-lr is unknown"),
        ("--sglang 3", "--sglang is unknown"),
        ("--lr", "--lr takes one value, got 0"),
        ("--lr 1 2", "--lr takes one value, got 2: 1 2"),
        ("--config", "--config takes one value, got 0"),
        ("--print-config yes", "--print-config takes no value, got yes"),
        ("--colocate true", "--colocate takes no value, got true; write --colocate or --no-colocate"),
        ("--colocate=false", "--colocate takes no value, got false; write --colocate or --no-colocate"),
        ("--no-sglang-enable-metrics 1", "--no-sglang-enable-metrics takes no value, got 1"),
        ("--rollout-stop", "--rollout-stop takes one or more values, got none"),
        ("--apply-chat-template-kwargs {a", "--apply-chat-template-kwargs takes a JSON object, got '{a'"),
        ("--apply-chat-template-kwargs [1]", "--apply-chat-template-kwargs takes a JSON object such as"),
        ("stray --lr 1", "stray stands before the first flag"),
        ("stray", "stray stands before the first flag"),
    ],
)
def test_refused(words, expected):
    (problem,) = read_command_line(words.split()).problems
    assert expected in problem
