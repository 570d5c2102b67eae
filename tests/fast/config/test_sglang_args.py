"""`--sglang-NAME` against the installed SGLang, and against a small ServerArgs."""

import pytest

from miles.config.resolve import ConfigError, resolve
from miles.config.sglang_args import SET_BY_MILES, read_server_arguments, server_arguments

SOURCE = '''
FORMATS = ["auto", "pt"]

@dataclasses.dataclass
class ServerArgs:
    """Doc."""

    # A comment.
    model_path: A[str, Arg(help="...", aliases=["--model"])]
    load_format: A[str, Arg(help="...", choices=FORMATS)] = "auto"
    mode: A[Optional[Literal["fast", "slow"]], "..."] = None
    size: A[Optional[int], Arg(help="...", type_parser=human_readable_int)] = None
    ids: A[Optional[List[int]], "..."] = None
    extra: A[Optional[Dict[str, Any]], Arg(help="...", type_parser=json.loads)] = None
    gemm_runner: A[str, Arg(help="...", cli_name="--gemm")] = "auto"
    hidden: A[bool, Arg(help="...", no_cli=True)] = False
    old: A[bool, Arg(help="...", no_cli=True)] = False
    parser: Optional[str] = None
    hook: Optional[Callable] = None

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--old", action=Deprecated)
        parser.add_argument("--parser", type=str)
        parser.add_argument("--format", action=DeprecatedAliasStoreAction, new_flag="--load-format")
        parser.add_argument("--fast", action=DeprecatedStoreTrueAction, new_flag="--mode")

    def other(self):
        local: int = 3
'''


def test_reading_a_source():
    known = read_server_arguments(SOURCE)
    kinds = {name: (argument.name, argument.kind, argument.choices) for name, argument in known.items()}
    assert [name for name, argument in known.items() if argument.is_older] == ["format"]
    del kinds["format"]
    assert kinds == {
        "model_path": ("model_path", str, None),
        "model": ("model_path", str, None),
        "load_format": ("load_format", str, ("auto", "pt")),
        "mode": ("mode", str, ("fast", "slow")),
        "size": ("size", int | str, None),
        "ids": ("ids", list[int], None),
        "extra": ("extra", dict, None),
        "gemm": ("gemm", str, None),
        "old": ("old", bool, None),
        "parser": ("parser", str, None),
    }


def test_values_get_their_types(argv, folder):
    (folder / "run.yaml").write_text("sglang_dp_size: 1\nsglang_cuda_graph_bs_decode: [1, 2]\n")
    config = resolve(
        argv(
            "--config run.yaml --sglang-mem-fraction-static 0.3 --sglang-max-running-requests 8 --sglang-dtype float32 "
            "--sglang-disable-cuda-graph --no-sglang-enable-metrics --sglang-context-length 128k "
            '--sglang-extra-metric-labels {"a":"b"} --sglang-data-parallel-size 1'
        )
    ).config
    assert config.sglang == {
        "dp_size": 1,
        "cuda_graph_bs_decode": [1, 2],
        "mem_fraction_static": 0.3,
        "max_running_requests": 8,
        "dtype": "float32",
        "disable_cuda_graph": True,
        "enable_metrics": False,
        "context_length": "128k",
        "extra_metric_labels": {"a": "b"},
    }


def test_a_path_that_is_there_is_absolute(argv, folder, monkeypatch):
    """A server starts in another folder; a model of the hub, or a name of SGLang's own, is no path."""
    monkeypatch.setenv("HOME", "/home/me")
    more = (
        "--sglang-speculative-draft-model-path model --sglang-chat-template train.jsonl --sglang-crash-dump-folder ~/d"
    )
    sglang = resolve(argv(more)).config.sglang
    assert sglang["speculative_draft_model_path"] == str(folder / "model")
    assert sglang["chat_template"] == str(folder / "train.jsonl")
    assert sglang["crash_dump_folder"] == "/home/me/d"
    sglang = resolve(argv("--sglang-tokenizer-path org/model --sglang-chat-template chatml")).config.sglang
    assert (sglang["tokenizer_path"], sglang["chat_template"]) == ("org/model", "chatml")


def test_a_field_that_starts_like_a_server_argument_is_a_field(argv):
    config = resolve(argv("--sglang-server-concurrency 3")).config
    assert (config.sglang_server_concurrency, config.sglang) == (3, {})


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("--sglang-mem-fraction 1", "is unknown to the installed SGLang; did you mean --sglang-mem-fraction-static"),
        ("--sglang-tp-size 2", "--sglang-tp-size 2 contradicts --rollout-num-gpus-per-engine 1"),
        ("--sglang-tensor-parallel-size 2", "--sglang-tp-size 2 contradicts --rollout-num-gpus-per-engine 1"),
        ("--no-sglang-enable-memory-saver", "cannot be given: it follows from --offload-rollout"),
        ("--sglang-model other", "--sglang-model cannot be given: Miles passes --hf-checkpoint"),
        ("--sglang-mem-fraction-static much", "--sglang-mem-fraction-static is 'much': input should be a valid number"),
        ("--sglang-mem-fraction-static 1 2", "--sglang-mem-fraction-static takes one value, got 2: 1 2"),
        ("--sglang-mem-fraction-static", "--sglang-mem-fraction-static needs a value"),
        ("--sglang-disable-cuda-graph 1", "takes no value, got 1; --no-sglang-disable-cuda-graph turns it off"),
        ("--sglang-dtype fp3", "--sglang-dtype is 'fp3'; allowed: auto, half, float16"),
        ("--sglang-extra-metric-labels {a", "--sglang-extra-metric-labels takes JSON, got '{a'"),
        ("--sglang-extra-metric-labels [1]", "--sglang-extra-metric-labels is [1]: input should be a valid dictionary"),
        ("--sglang-dp-size 1 --sglang-data-parallel-size 1", "and --sglang-dp-size are one argument; keep one"),
    ],
)
def test_refused(argv, more, expected):
    with pytest.raises(ConfigError) as caught:
        resolve(argv(more))
    (problem,) = caught.value.problems
    assert expected in problem


def test_what_miles_sets_exists_in_the_installed_version():
    assert set(SET_BY_MILES) <= set(server_arguments())
