"""A command line that is right, for tests to spoil."""

import json

import pytest

from miles.residency import filesystem

# Functions of the user's own.
MODULES = {
    "a": "b B generate",
    "c": "d",
    "mine": "loss",
    "my_agent": "run",
    "my_module": "evaluate function generate my_function reward weights",
    "my_tools": "execute",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a checkpoint folder `model` and prompt files `train.jsonl` and `held_out.jsonl`.

    It is $SCRATCH too, and all that is here counts as on a disk, but for /dev/shm.
    """
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/sda1 / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n")
    monkeypatch.setattr(filesystem, "MOUNTS", mounts)
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    model = tmp_path / "model"
    model.mkdir()
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
    }
    (model / "config.json").write_text(json.dumps(shape))
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "held_out.jsonl").touch()
    for module, names in MODULES.items():
        (tmp_path / f"{module}.py").write_text("".join(f"{name} = print\n" for name in names.split()))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def good(folder):
    """Flags of a colocated run on four CPU ranks, as a dict that a test changes; None takes a flag out."""
    return {
        "--device": "cpu",
        "--actor-num-gpus-per-node": "4",
        "--colocate": "",
        "--no-offload-train": "",
        "--no-offload-rollout": "",
        "--hf-checkpoint": "model",
        "--prompt-data": "train.jsonl",
        "--label-key": "answer",
        "--rm-type": "exact",
        "--num-rollout": "3",
        "--rollout-batch-size": "8",
        "--n-samples-per-prompt": "4",
        "--rollout-max-response-len": "16",
    }


@pytest.fixture
def argv(good):
    """Build a command line: the good one with `changes` laid over it, and the words of `more` behind it."""

    def build(more="", **changes):
        flags = good | {"--" + name.replace("_", "-"): value for name, value in changes.items()}
        words = [word for flag, value in flags.items() if value is not None for word in [flag, *value.split()]]
        return words + more.split()

    return build
