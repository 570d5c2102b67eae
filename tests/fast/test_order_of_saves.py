"""Where saves, evaluations and resumptions stand in the order of the driver, which test_order.py has."""

import gc
import weakref

import pytest

from miles.ray.handover import Handover
from miles.ray.rollout.training_data import RolloutResult
from miles.residency.state import ResidencyError
from tests.fast.fake_checkpoint import save_fake
from tests.fast.orders import AHEAD, ASYNC, CASES, CPU, GPU, SPLIT_SET_UP
from tests.fast.recording_driver import calls_of, driver

DISPOSE = "rollout dispose"


@pytest.fixture
def drive(tmp_path, monkeypatch):
    """Runs `train.run` on the configuration of `flags`; returns the calls."""
    return driver(tmp_path, monkeypatch)


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


@pytest.mark.parametrize(
    "more, rollouts, kept",
    [
        ("", 7, [1, 4, 5, 6]),
        ("--save-retain-interval 2", 7, [1, 5, 6]),
        ("--save-retain-interval 2 --finetune", 3, [1, 2, 4]),
        ("--save-retain-interval 2 --start-rollout-id 2", 4, [1, 3, 4]),
    ],
)
async def test_old_checkpoints_are_taken_away(drive, tmp_path, more, rollouts, kept):
    """With the one that the run went on from, 4; what an earlier run left, 1, is not this one's, and the last stays.

    What a new run took its weights from stays too, and what was to come after the rollouts that are repeated.
    """
    save_fake(tmp_path / "checkpoints", 1, 4)
    flags = f"--save checkpoints --save-interval 1 --load checkpoints {more}"
    await drive(f"--colocate {flags}", rollouts=rollouts)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("*iter_*")) == [
        f"iter_{rollout_id:07d}" for rollout_id in kept
    ]


async def test_a_critics_checkpoints_go_with_the_actors(drive, tmp_path):
    flags = "--colocate --advantage-estimator ppo --save actor --critic-save critic --save-interval 1"
    await drive(f"{flags} --save-retain-interval 2", rollouts=3)
    for root in ("actor", "critic"):
        assert {path.name for path in (tmp_path / root).glob("*iter_*")} == {"iter_0000001", "iter_0000002"}


async def test_a_new_run_with_the_weights_of_a_checkpoint(drive, tmp_path):
    """Prompts and samples are not taken from it, and the first rollout is 0."""
    save_fake(tmp_path / "checkpoints", 4)
    assert await drive("--colocate --load checkpoints --finetune") == list(CASES["--colocate"])


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
