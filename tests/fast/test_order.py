"""The order of the whole driver: every call that `train.run` makes to trainer and engines, for every policy.

The services only record. The main cases are written out; the others are compared with the tables of
docs/advanced/colocate.md, told once more here.
"""

import importlib.util
import itertools
import json
from pathlib import Path

import pytest

from miles.ray import placement_group
from miles.ray.handover import Handover
from miles.ray.rollout.rollout_manager import RolloutResult
from miles.residency import filesystem
from miles.residency.state import ResidencyError
from miles.utils.arguments import parse_args

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("train", ROOT / "train.py")
train = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(train)


class Service:
    """A client whose every call is written down as "<name> <verb> <arguments>"."""

    def __init__(self, name, calls, answers, fail_at=None):
        self._name, self._calls, self._answers, self._fail_at = name, calls, answers, fail_at

    def __getattr__(self, verb):
        if verb.startswith("_"):
            raise AttributeError(verb)

        async def call(*arguments):
            words = (" ".join(argument) if isinstance(argument, list) else str(argument) for argument in arguments)
            line = " ".join((self._name, verb, *(() if verb in ("connect", "train", "save") else words)))
            line += f" {arguments[0]}" if verb in ("train", "save") else ""
            if len(self._calls) == self._fail_at:
                raise OSError(line)
            self._calls.append(line)
            return self._answers.get(verb, {})

        return call


@pytest.fixture
def drive(tmp_path, monkeypatch):
    """Runs `train.run` with recording services on the configuration of `flags`; returns the calls."""
    (tmp_path / "model").mkdir()
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    (tmp_path / "model" / "config.json").write_text(json.dumps(shape))
    (tmp_path / "prompts.jsonl").touch()
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/sda1 / ext4 rw 0 0\n")
    monkeypatch.setattr(filesystem, "MOUNTS", mounts)
    monkeypatch.chdir(tmp_path)
    base = [
        *("--device", "cpu", "--actor-num-gpus-per-node", "4", "--hf-checkpoint", "model", "--label-key", "answer"),
        *("--prompt-data", "prompts.jsonl", "--rm-type", "exact", "--num-rollout", "3", "--rollout-batch-size", "8"),
        *("--n-samples-per-prompt", "4", "--rollout-max-response-len", "16", "--no-use-tensorboard"),
    ]
    folders = itertools.count()

    async def run(flags="--colocate", calls=None, fail_at=None):
        config = parse_args([*base, *flags.split(), "--run-dir", str(tmp_path / f"run {next(folders)}")])
        calls = [] if calls is None else calls
        answers = {
            "generate": RolloutResult([], {}),
            "engine_urls": ["http://engine"],
            "start_rollout_id": 0,
            "resolved_config": config,
        }
        rollout, trainer = (Service(name, calls, answers, fail_at) for name in ("rollout", "trainer"))

        async def create_rollout_manager(config, placement):
            calls.append("rollout created")
            return rollout

        async def create_training_models(config, placement):
            calls.append("trainer created")
            return trainer

        monkeypatch.setattr(placement_group, "create_placement_groups", lambda config: None)
        monkeypatch.setattr(placement_group, "create_rollout_manager", create_rollout_manager)
        monkeypatch.setattr(placement_group, "create_training_models", create_training_models)
        await train.run(config)
        return calls

    return run


def calls_of(text):
    """The calls in it, separated by commas and line ends."""
    return [call.strip() for call in text.strip().replace("\n", ",").split(",")]


def three_steps(set_up, step):
    """All calls; `{id}` of a step is the rollout's number, `{version}` that of the weights it sends."""
    steps = [line.format(id=rollout_id, version=rollout_id + 2) for rollout_id in range(3) for line in calls_of(step)]
    return ["rollout created", "rollout resolved_config", *calls_of(set_up), *steps, "rollout dispose"]


CASES = {
    "--colocate": three_steps(
        """
        rollout offload cuda_graph kv_cache weights
        trainer created, trainer sleep
        trainer start_rollout_id, rollout engine_urls, trainer connect
        rollout onload_weights, trainer update_weights 1, rollout onload_kv
        """,
        """
        rollout generate {id}
        rollout offload cuda_graph kv_cache weights, trainer onload
        trainer train {id}
        trainer sleep, rollout onload_weights, trainer update_weights {version}, rollout onload_kv
        """,
    ),
    "--colocate --colocate-memory-peak-device gpu": three_steps(
        """
        rollout offload_kv
        trainer created, trainer sleep
        trainer start_rollout_id, rollout engine_urls, trainer connect
        trainer update_weights 1, rollout onload_kv
        """,
        """
        rollout generate {id}
        rollout offload_kv, trainer onload, rollout offload_weights
        trainer train {id}
        trainer clear_memory, rollout onload_weights, trainer sleep, trainer update_weights {version}, rollout onload_kv
        """,
    ),
    "--colocate --offload-rollout-level kv_cache": three_steps(
        """
        rollout offload_kv
        trainer created, trainer sleep
        trainer start_rollout_id, rollout engine_urls, trainer connect
        trainer update_weights 1, rollout onload_kv
        """,
        """
        rollout generate {id}
        rollout offload_kv, trainer onload
        trainer train {id}
        trainer sleep, trainer update_weights {version}, rollout onload_kv
        """,
    ),
    "--colocate --offload-rollout-level weight": three_steps(
        """
        rollout offload cuda_graph weights
        trainer created, trainer sleep
        trainer start_rollout_id, rollout engine_urls, trainer connect
        rollout onload_weights, trainer update_weights 1, rollout onload_kv
        """,
        """
        rollout generate {id}
        rollout offload cuda_graph weights, trainer onload
        trainer train {id}
        trainer sleep, rollout onload_weights, trainer update_weights {version}, rollout onload_kv
        """,
    ),
    "--colocate --colocate-memory-peak-device gpu --offload-rollout-level": three_steps(
        """
        rollout offload_kv
        trainer created, trainer sleep
        trainer start_rollout_id, rollout engine_urls, trainer connect
        trainer update_weights 1, rollout onload_kv
        """,
        """
        rollout generate {id}
        rollout offload_kv, trainer onload
        trainer train {id}
        trainer clear_memory, trainer sleep, trainer update_weights {version}, rollout onload_kv
        """,
    ),
    "--colocate --no-offload-rollout": three_steps(
        """
        trainer created, trainer sleep
        trainer start_rollout_id, rollout engine_urls, trainer connect
        trainer update_weights 1
        """,
        """
        rollout generate {id}
        trainer onload
        trainer train {id}
        trainer sleep, trainer update_weights {version}
        """,
    ),
    "--colocate --no-offload-train": three_steps(
        """
        rollout offload cuda_graph kv_cache weights
        trainer created
        trainer start_rollout_id, rollout engine_urls, trainer connect
        trainer clear_memory, rollout onload_weights, trainer update_weights 1, rollout onload_kv
        """,
        """
        rollout generate {id}
        rollout offload cuda_graph kv_cache weights
        trainer train {id}
        trainer clear_memory, rollout onload_weights, trainer update_weights {version}, rollout onload_kv
        """,
    ),
    "--colocate --no-offload": three_steps(
        """
        trainer created
        trainer start_rollout_id, rollout engine_urls, trainer connect
        trainer update_weights 1
        """,
        """
        rollout generate {id}
        trainer train {id}
        trainer update_weights {version}
        """,
    ),
    "--colocate --bf16 --rematerialize-param-from-master-weight": three_steps(
        """
        rollout offload cuda_graph kv_cache weights
        trainer created, trainer sleep
        trainer start_rollout_id, rollout engine_urls, trainer connect
        rollout onload_weights, trainer update_weights 1, trainer destroy_process_groups, rollout onload_kv
        """,
        """
        rollout generate {id}
        rollout offload cuda_graph kv_cache weights, trainer onload
        trainer train {id}
        trainer sleep, rollout onload_weights
        trainer update_weights {version}, trainer destroy_process_groups, rollout onload_kv
        """,
    ),
    "--colocate --colocate-memory-peak-device gpu --tensor-model-parallel-size 2": three_steps(
        """
        rollout offload_kv
        trainer created, trainer sleep
        trainer start_rollout_id, rollout engine_urls, trainer connect
        trainer update_weights 1, trainer destroy_process_groups, rollout onload_kv
        """,
        """
        rollout generate {id}
        rollout offload_kv, trainer onload, rollout offload_weights
        trainer train {id}
        trainer clear_memory, rollout onload_weights, trainer sleep
        trainer update_weights {version}, trainer destroy_process_groups, rollout onload_kv
        """,
    ),
}
CPU = CASES["--colocate"]
GPU = CASES["--colocate --colocate-memory-peak-device gpu"]
CASES["--colocate --offload-train-target disk --offload-train-disk-dir ."] = CPU
CASES["--colocate --stream-optimizer-state-to-disk --offload-train-disk-dir ."] = CPU
CASES["--colocate --colocate-memory-peak-device gpu --offload-train-target disk --offload-train-disk-dir ."] = GPU
CASES["--rollout-num-gpus 1"] = CASES["--colocate --no-offload"]
# Where a side is missing nothing moves and nothing is sent.
CASES["--colocate --debug-rollout-only"] = three_steps("trainer created", "rollout generate {id}")
CASES["--colocate --debug-train-only --loss-type sft_loss"] = CASES["--loss-type sft_loss"] = three_steps(
    "trainer created, trainer start_rollout_id", "rollout generate {id}, trainer train {id}"
)


@pytest.mark.parametrize("flags", CASES)
async def test_all_calls_of_a_run(drive, flags):
    assert await drive(flags) == CASES[flags]


async def test_saving_and_evaluation_find_their_side_awake(drive, tmp_path):
    (tmp_path / "held_out.jsonl").touch()
    (tmp_path / "checkpoints").mkdir()
    flags = (
        "--colocate --colocate-memory-peak-device gpu --save checkpoints --save-interval 2 --save-hf hf_{rollout_id} "
        "--eval-prompt-data held_out held_out.jsonl --eval-interval 2"
    )
    calls = list(GPU)

    def insert(before, *more):
        calls[calls.index(before) : calls.index(before)] = more

    folder = tmp_path / "checkpoints"
    insert("rollout generate 0", "rollout evaluate 0")
    # After the second step and after the last: saved before the trainer sleeps, evaluated once the engines are back.
    for rollout_id, after in ((1, "rollout generate 2"), (2, "rollout dispose")):
        trained = calls.index(f"trainer train {rollout_id}") + 1
        calls[trained:trained] = [
            f"trainer save {rollout_id}",
            f"rollout save {folder / f'iter_{rollout_id:07d}'}",
            f"trainer export_hf {rollout_id}",
        ]
        insert(after, f"rollout evaluate {rollout_id}")
    assert await drive(flags) == calls
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "2\n"


@pytest.mark.parametrize(
    ("check", "last_call"),
    [("before_save", "trainer train 0"), ("before_evaluation", "rollout onload_kv")],
)
async def test_saving_and_evaluation_are_refused_where_their_side_is_away(drive, monkeypatch, check, last_call):
    def refuse(handover):
        raise ResidencyError("away")

    monkeypatch.setattr(Handover, check, refuse)
    calls = []
    with pytest.raises(ResidencyError, match="away"):
        await drive("--colocate --save checkpoints --save-interval 1", calls)
    assert calls == CPU[: len(calls)] and calls[-1] == last_call


async def test_each_evaluation_is_preceded_by_its_check(drive, monkeypatch):
    calls = []
    monkeypatch.setattr(Handover, "before_evaluation", lambda handover: calls.append("check"))
    await drive("--colocate", calls)
    # Before the first step and at the end of each.
    assert [number for number, call in enumerate(calls) if call == "check"] == [11, 20, 29, 38]


@pytest.mark.parametrize("peak", ["cpu", "gpu"])
async def test_a_call_that_fails_ends_the_run_there(drive, peak):
    flags, calls = f"--colocate --colocate-memory-peak-device {peak}", {"cpu": CPU, "gpu": GPU}[peak]
    for position, line in enumerate(calls):
        if line.endswith("created"):
            continue
        made = []
        with pytest.raises(OSError, match=f"^{line}$"):
            await drive(flags, made, fail_at=position)
        assert made == calls[:position]


CHOICES = {
    "offload_train": ("--offload-train", "--no-offload-train"),
    "offload_rollout": ("--offload-rollout", "--no-offload-rollout"),
    "levels": ("kv_cache weight", "kv_cache", "weight", ""),
    "target": ("cpu", "disk"),
    "peak": ("cpu", "gpu"),
    "rebuild": ("", "--bf16 --rematerialize-param-from-master-weight"),
    "stream": ("", "--stream-optimizer-state-to-disk"),
    "tensor": ("1", "2"),
}


def allowed(v):
    both = v["offload_train"] == "--offload-train" and v["offload_rollout"] == "--offload-rollout"
    if v["offload_train"] != "--offload-train" and (v["target"] == "disk" or v["rebuild"]):
        return False
    return (v["peak"] == "cpu" or both) and not (v["rebuild"] and (v["stream"] or v["target"] == "disk"))


def told_by_the_tables(v):
    """The rows of both tables, with what is not named left out."""
    train, rollout = v["offload_train"] == "--offload-train", v["offload_rollout"] == "--offload-rollout"
    gpu, weights = v["peak"] == "gpu", "weight" in v["levels"]
    tags = ["cuda_graph", *(["kv_cache"] if "kv_cache" in v["levels"] else []), *(["weights"] if weights else [])]
    gathers = v["tensor"] == "2" or v["rebuild"]

    engine_leaves = [f"rollout offload {' '.join(tags)}" if weights else "rollout offload_kv"] if rollout else []
    pools_leave, pools_return = (["rollout offload_kv"], ["rollout onload_kv"]) if rollout else ([], [])
    weights_leave = ["rollout offload_weights"] if rollout and weights else []
    weights_return = ["rollout onload_weights"] if rollout and weights else []
    sleeps, wakes = (["trainer sleep"], ["trainer onload"]) if train else ([], [])
    clears = ["trainer clear_memory"] if rollout and not train else []
    sync = ["trainer update_weights {version}"]
    if gathers and train:
        # What the sync gathers over stays for it, and is gone before the pools return.
        sync = [*sync, "trainer destroy_process_groups"]

    engines_up = pools_leave if gpu else engine_leaves
    first_sync = (sync if gpu else clears + weights_return + sync) + pools_return
    if gpu:
        after_generate = pools_leave + wakes + weights_leave
        after_train = ["trainer clear_memory"] + weights_return + sleeps + sync + pools_return
    else:
        after_generate = engine_leaves + wakes
        after_train = sleeps + clears + weights_return + sync + pools_return

    built = ["trainer created", *sleeps, "trainer start_rollout_id", "rollout engine_urls", "trainer connect"]
    set_up = [*engines_up, *built, *(line.format(version=1) for line in first_sync)]
    step = ["rollout generate {id}", *after_generate, "trainer train {id}", *after_train]
    return three_steps(", ".join(set_up), ", ".join(step))


async def test_every_policy_that_a_command_line_can_ask_for(drive):
    policies = [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]
    policies = [v for v in policies if allowed(v)]
    # Offloads and peak: three in which the trainer sleeps, with five choices of target, rebuild and stream, and two
    # in which it does not, with two; each with four sets of levels, and with and without tensor parallelism.
    assert len(policies) == (3 * 5 + 2 * 2) * 4 * 2
    for v in policies:
        flags = (
            f"--colocate {v['offload_train']} {v['offload_rollout']} --offload-rollout-level {v['levels']} "
            f"--offload-train-target {v['target']} --colocate-memory-peak-device {v['peak']} {v['rebuild']} "
            f"{v['stream']} --tensor-model-parallel-size {v['tensor']}"
        )
        if v["target"] == "disk" or v["stream"]:
            flags += " --offload-train-disk-dir ."
        assert await drive(flags) == told_by_the_tables(v), flags
