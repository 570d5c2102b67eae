"""The order of the whole driver: every call that `train.run` makes to trainer and engines, for every policy.

The services only record. The main cases are written out; the others are compared with the tables of
docs/advanced/colocate.md, told once more here. With a critic: test_order_with_critic.py.
"""

import gc
import itertools
import weakref

import pytest

from miles.ray.handover import Handover
from miles.ray.rollout.training_data import RolloutResult
from miles.residency.state import ResidencyError
from tests.fast.fake_checkpoint import save_fake
from tests.fast.recording_driver import calls_of, driver, steps_of

DISPOSE = "rollout dispose"


@pytest.fixture
def drive(tmp_path, monkeypatch):
    """Runs `train.run` on the configuration of `flags`; returns the calls."""
    return driver(tmp_path, monkeypatch)


def three_steps(set_up, step):
    """All calls of a run of three equal steps."""
    return steps_of(set_up, step, step, step)


CASES = {
    "--colocate": three_steps(
        """
        rollout leaves cuda_graph kv_cache weights
        trainer init, trainer leaves comm grads weights optimizer
        rollout engine_urls, trainer connect
        rollout returns weights, trainer update_weights 1, rollout returns kv_cache cuda_graph
        """,
        """
        rollout generate {id}
        rollout leaves cuda_graph kv_cache weights, trainer returns optimizer weights grads comm
        trainer train {id}
        trainer leaves comm grads weights optimizer, rollout returns weights
        trainer update_weights {version}, rollout returns kv_cache cuda_graph
        """,
    ),
    "--colocate --colocate-memory-peak-device gpu": three_steps(
        """
        rollout leaves cuda_graph kv_cache
        trainer init, trainer leaves comm grads weights optimizer
        rollout engine_urls, trainer connect
        trainer update_weights 1, rollout returns kv_cache cuda_graph
        """,
        """
        rollout generate {id}
        rollout leaves cuda_graph kv_cache, trainer returns optimizer weights grads comm, rollout leaves weights
        trainer train {id}
        trainer clear_memory, rollout returns weights, trainer leaves comm grads weights optimizer
        trainer update_weights {version}, rollout returns kv_cache cuda_graph
        """,
    ),
    "--colocate --offload-rollout-level kv_cache": three_steps(
        """
        rollout leaves cuda_graph kv_cache
        trainer init, trainer leaves comm grads weights optimizer
        rollout engine_urls, trainer connect
        trainer update_weights 1, rollout returns kv_cache cuda_graph
        """,
        """
        rollout generate {id}
        rollout leaves cuda_graph kv_cache, trainer returns optimizer weights grads comm
        trainer train {id}
        trainer leaves comm grads weights optimizer
        trainer update_weights {version}, rollout returns kv_cache cuda_graph
        """,
    ),
    "--colocate --offload-rollout-level weight": three_steps(
        """
        rollout leaves cuda_graph weights
        trainer init, trainer leaves comm grads weights optimizer
        rollout engine_urls, trainer connect
        rollout returns weights, trainer update_weights 1, rollout returns cuda_graph
        """,
        """
        rollout generate {id}
        rollout leaves cuda_graph weights, trainer returns optimizer weights grads comm
        trainer train {id}
        trainer leaves comm grads weights optimizer, rollout returns weights
        trainer update_weights {version}, rollout returns cuda_graph
        """,
    ),
    "--colocate --colocate-memory-peak-device gpu --offload-rollout-level": three_steps(
        """
        rollout leaves cuda_graph
        trainer init, trainer leaves comm grads weights optimizer
        rollout engine_urls, trainer connect
        trainer update_weights 1, rollout returns cuda_graph
        """,
        """
        rollout generate {id}
        rollout leaves cuda_graph, trainer returns optimizer weights grads comm
        trainer train {id}
        trainer clear_memory, trainer leaves comm grads weights optimizer
        trainer update_weights {version}, rollout returns cuda_graph
        """,
    ),
    "--colocate --no-offload-rollout": three_steps(
        """
        trainer init, trainer leaves comm grads weights optimizer
        rollout engine_urls, trainer connect
        trainer update_weights 1
        """,
        """
        rollout generate {id}
        trainer returns optimizer weights grads comm
        trainer train {id}
        trainer leaves comm grads weights optimizer, trainer update_weights {version}
        """,
    ),
    "--colocate --no-offload-train": three_steps(
        """
        rollout leaves cuda_graph kv_cache weights
        trainer init
        rollout engine_urls, trainer connect
        trainer clear_memory, rollout returns weights, trainer update_weights 1, rollout returns kv_cache cuda_graph
        """,
        """
        rollout generate {id}
        rollout leaves cuda_graph kv_cache weights
        trainer train {id}
        trainer clear_memory, rollout returns weights
        trainer update_weights {version}, rollout returns kv_cache cuda_graph
        """,
    ),
    "--colocate --no-offload": three_steps(
        """
        trainer init
        rollout engine_urls, trainer connect
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
        rollout leaves cuda_graph kv_cache weights
        trainer init, trainer leaves weights grads optimizer
        rollout engine_urls, trainer connect
        rollout returns weights, trainer update_weights 1, trainer leaves comm, rollout returns kv_cache cuda_graph
        """,
        """
        rollout generate {id}
        rollout leaves cuda_graph kv_cache weights, trainer returns comm optimizer grads weights
        trainer train {id}
        trainer leaves weights grads optimizer, rollout returns weights
        trainer update_weights {version}, trainer leaves comm, rollout returns kv_cache cuda_graph
        """,
    ),
    "--colocate --colocate-memory-peak-device gpu --tensor-model-parallel-size 2": three_steps(
        """
        rollout leaves cuda_graph kv_cache
        trainer init, trainer leaves grads weights optimizer
        rollout engine_urls, trainer connect
        trainer update_weights 1, trainer leaves comm, rollout returns kv_cache cuda_graph
        """,
        """
        rollout generate {id}
        rollout leaves cuda_graph kv_cache, trainer returns comm optimizer weights grads, rollout leaves weights
        trainer train {id}
        trainer clear_memory, rollout returns weights, trainer leaves grads weights optimizer
        trainer update_weights {version}, trainer leaves comm, rollout returns kv_cache cuda_graph
        """,
    ),
}
CPU = CASES["--colocate"]
GPU = CASES["--colocate --colocate-memory-peak-device gpu"]
CASES["--colocate --offload-train-target disk --offload-train-disk-dir ."] = CPU
CASES["--colocate --stream-optimizer-state-to-disk --offload-train-disk-dir ."] = [
    call.replace(" optimizer", "") for call in CPU
]
CASES["--colocate --colocate-memory-peak-device gpu --offload-train-target disk --offload-train-disk-dir ."] = GPU
CASES["--rollout-num-gpus 1"] = CASES["--colocate --no-offload"]
# Where a side is missing nothing moves and nothing is sent.
CASES["--colocate --debug-rollout-only"] = three_steps("", "rollout generate {id}")
CASES["--colocate --debug-train-only --loss-type sft_loss"] = CASES["--loss-type sft_loss"] = three_steps(
    "trainer init", "rollout generate {id}, trainer train {id}"
)


SPLIT_SET_UP = "trainer init, rollout engine_urls, trainer connect, trainer update_weights 1"
AHEAD = "--rollout-num-gpus 1 --one-step-ahead"
ASYNC = "--rollout-num-gpus 1 --fully-async"
CASES[AHEAD] = steps_of(
    SPLIT_SET_UP,
    "rollout generate 0, rollout generate 1, trainer train 0, trainer update_weights {version}",
    "rollout generate 2, trainer train 1, trainer update_weights {version}",
    "trainer train 2, trainer update_weights {version}",
)
CASES[f"{AHEAD} --update-weights-interval 2"] = steps_of(
    SPLIT_SET_UP,
    "rollout generate 0, rollout generate 1, trainer train 0",
    "rollout generate 2, trainer train 1, trainer update_weights {version}",
    "trainer train 2",
)
CASES[ASYNC] = three_steps(
    SPLIT_SET_UP.replace("trainer update_weights 1", "rollout hold, trainer update_weights 1, rollout release"),
    """
    rollout generate {id}, trainer train {id}
    rollout hold, trainer update_weights {version}, rollout release
    """,
)
# Without a trainer nothing is overlapped with, and without engines nothing is to be overlapped.
GENERATED_AHEAD = ("rollout generate 1", "rollout generate 2")
CASES[f"{AHEAD} --debug-rollout-only"] = steps_of(
    "", "rollout generate 0, rollout generate 1", "rollout generate 2", ""
)
CASES[f"{ASYNC} --debug-rollout-only"] = CASES["--colocate --debug-rollout-only"]
CASES["--one-step-ahead --loss-type sft_loss"] = CASES["--loss-type sft_loss"]


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
    insert("rollout generate 0", "rollout evaluate 0 True")
    # After the second step and after the last: saved before the trainer sleeps, evaluated once the engines are back.
    for rollout_id, after in ((1, "rollout generate 2"), (2, "rollout dispose")):
        trained = calls.index(f"trainer train {rollout_id}") + 1
        calls[trained:trained] = [
            f"trainer save {rollout_id}",
            f"rollout save {folder / f'.iter_{rollout_id:07d}.partial'}",
            f"trainer export_hf {rollout_id}",
        ]
        insert(after, f"rollout evaluate {rollout_id} False")
    assert await drive(flags) == calls
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "2\n"


async def test_what_is_saved_or_evaluated_is_synced_whatever_the_interval(drive, tmp_path):
    (tmp_path / "held_out.jsonl").touch()
    (tmp_path / "checkpoints").mkdir()
    flags = f"{AHEAD} --update-weights-interval 100 --save checkpoints --save-interval 2"
    expected = list(CASES[f"{AHEAD} --update-weights-interval 2"])
    saved = [
        ["trainer save 1", f"rollout save {tmp_path / 'checkpoints/.iter_0000001.partial'}"],
        ["trainer save 2", f"rollout save {tmp_path / 'checkpoints/.iter_0000002.partial'}"],
    ]
    expected[expected.index("trainer update_weights 2") : expected.index("trainer update_weights 2")] = saved[0]
    expected[-1:-1] = [*saved[1], "trainer update_weights 3"]
    assert await drive(flags) == expected

    flags = f"{AHEAD} --update-weights-interval 100 --eval-prompt-data held_out held_out.jsonl --eval-interval 2"
    expected = list(CASES[f"{AHEAD} --update-weights-interval 2"])
    place = expected.index("rollout generate 0")
    expected[place:place] = ["rollout evaluate 0 True"]
    place = expected.index("trainer update_weights 2") + 1
    expected[place:place] = ["rollout evaluate 1 False"]
    expected[-1:-1] = ["trainer update_weights 3", "rollout evaluate 2 False"]
    assert await drive(flags) == expected


async def test_a_resumed_run_goes_on_with_prompts_and_versions(drive, tmp_path):
    save_fake(tmp_path / "checkpoints", 1)
    calls = await drive("--rollout-num-gpus 1 --load checkpoints")
    assert calls == [
        *("rollout created", "rollout resolved_config", "trainer init"),
        *(
            f"rollout load {tmp_path}/checkpoints/iter_0000001",
            "rollout engine_urls",
            "trainer connect",
            "trainer update_weights 8",
        ),
        *("rollout generate 2", "trainer train 2", "trainer update_weights 9", "rollout dispose"),
    ]


@pytest.mark.parametrize("length", ["", "--num-epoch 3"])
async def test_a_finished_run_says_so_and_ends(drive, tmp_path, capsys, length):
    """With a run folder of its own as well: nothing of the run that finished is looked for there."""
    save_fake(tmp_path / "checkpoints", 1, 2)
    calls = await drive(f"--rollout-num-gpus 1 --load checkpoints {length}")
    assert calls == (["rollout created", "rollout resolved_config", DISPOSE] if length else [])
    said = (
        f"nothing to do: this run of 3 rollouts is finished, {tmp_path}/checkpoints/iter_0000002 is its last checkpoint"
    )
    assert capsys.readouterr().out.startswith(said)
    assert "rollout generate 2" in await drive("--rollout-num-gpus 1 --load checkpoints --ckpt-step 1")


@pytest.mark.parametrize(
    ("flags", "step", "set_up"),
    [
        ("--rollout-num-gpus 1", 0, SPLIT_SET_UP),
        ("--rollout-num-gpus 1 --load checkpoints", 1, SPLIT_SET_UP),
        ("--colocate --debug-rollout-only", 0, ""),
        (ASYNC, 0, CASES[ASYNC][2:8]),
    ],
)
async def test_a_run_that_only_evaluates(drive, tmp_path, capsys, flags, step, set_up):
    """Once, with the weights that are there, on a first run and on a resumed one, with or without a trainer."""
    (tmp_path / "held_out.jsonl").touch()
    save_fake(tmp_path / "checkpoints", 1)
    flags += " --eval-prompt-data held_out held_out.jsonl"
    calls = await drive(flags, rollouts=0, evaluate={"eval/held_out": 0.25})
    set_up = calls_of(set_up) if isinstance(set_up, str) else set_up
    assert calls == ["rollout created", "rollout resolved_config", *set_up, f"rollout evaluate {step} False", DISPOSE]
    printed = capsys.readouterr().out
    assert printed.startswith("evaluation  eval/held_out 0.25\n1 step ") and "eval/held_out    0.250" in printed


async def test_saving_is_refused_where_the_trainer_is_away(drive, monkeypatch):
    def refuse(handover):
        raise ResidencyError("away")

    monkeypatch.setattr(Handover, "before_save", refuse)
    calls = []
    with pytest.raises(ResidencyError, match="away"):
        await drive("--colocate --save checkpoints --save-interval 1", calls)
    assert calls == CPU[: len(calls)] and calls[-1] == "trainer train 0"


async def test_an_evaluation_that_the_engines_refuse_ends_the_run(drive, tmp_path):
    (tmp_path / "held_out.jsonl").touch()

    def refuse():
        raise ResidencyError("away")

    calls, evaluated = [], "--eval-prompt-data held_out held_out.jsonl --eval-interval 2 --skip-eval-before-train"
    with pytest.raises(ResidencyError, match="away"):
        await drive(f"--colocate {evaluated}", calls, evaluate=refuse)
    assert [call for call in calls if "rollout g" in call or "evaluate" in call] == [
        *("rollout generate 0", "rollout generate 1"),
        "rollout evaluate 1 False",
    ]


@pytest.mark.parametrize("peak", ["cpu", "gpu"])
async def test_a_call_that_fails_ends_the_run_there(drive, peak):
    flags, calls = f"--colocate --colocate-memory-peak-device {peak}", {"cpu": CPU, "gpu": GPU}[peak]
    for position, line in enumerate(calls):
        if line == "rollout created":
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

    def moves(who, way, regions):
        return [f"{who} {way} {' '.join(regions)}"] if regions else []

    pools = [tag for tag in tags if tag != "weights"] if rollout else []
    engine_leaves = moves("rollout", "leaves", tags if rollout else [])
    pools_leave, pools_return = moves("rollout", "leaves", pools), moves("rollout", "returns", pools[::-1])
    weights_leave, weights_return = (
        moves("rollout", way, ["weights"] if rollout and weights else []) for way in ("leaves", "returns")
    )
    regions = ["comm", "grads", "weights", *(["optimizer"] if not v["stream"] else [])] if train else []
    if v["rebuild"]:
        # Last on its way back, when masters and groups are there.
        regions = ["weights", "comm", "grads", "optimizer"]
    # What the sync gathers over stays for it, and is gone before the pools return.
    late = ["comm"] if gathers and train else []
    early = [region for region in regions if region not in late]
    sleeps, wakes = moves("trainer", "leaves", early), moves("trainer", "returns", [*late, *early[::-1]])
    clears = ["trainer clear_memory"] if rollout and not train else []
    sync = ["trainer update_weights {version}", *moves("trainer", "leaves", late)]

    engines_up = pools_leave if gpu else engine_leaves
    first_sync = (sync if gpu else clears + weights_return + sync) + pools_return
    if gpu:
        after_generate = pools_leave + wakes + weights_leave
        after_train = ["trainer clear_memory"] + weights_return + sleeps + sync + pools_return
    else:
        after_generate = engine_leaves + wakes
        after_train = sleeps + clears + weights_return + sync + pools_return

    built = ["trainer init", *sleeps, "rollout engine_urls", "trainer connect"]
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


@pytest.mark.parametrize("schedule", ["--colocate", AHEAD, ASYNC])
async def test_a_batch_is_let_go_once_it_is_trained(drive, schedule):
    """While a rollout is made no earlier batch is kept alive, but for the one that is trained on meanwhile."""
    made, alive = [], []

    class Shard:
        """Stands for the reference to what lies in the object store."""

    def generate():
        gc.collect()
        alive.append([rollout_id for rollout_id, shard in enumerate(made) if shard() is not None])
        shard = Shard()
        made.append(weakref.ref(shard))
        return RolloutResult([shard], {})

    await drive(schedule, generate=generate)
    assert alive == ([[], [0], [1]] if schedule == AHEAD else [[], [], []])
