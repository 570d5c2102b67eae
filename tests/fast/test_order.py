"""The order of the whole driver: every call that `train.run` makes to trainer and engines, for every policy.

The services only record. The main cases are written out (orders.py); the others are compared with the tables of
docs/advanced/colocate.md, told once more here. Saving, evaluating and resuming: test_order_of_saves.py. With a critic:
test_order_with_critic.py.
"""

import itertools

import pytest

from tests.fast.orders import CASES, CPU, GPU, three_steps
from tests.fast.recording_driver import driver


@pytest.fixture
def drive(tmp_path, monkeypatch):
    """Runs `train.run` on the configuration of `flags`; returns the calls."""
    return driver(tmp_path, monkeypatch)


@pytest.mark.parametrize("flags", CASES)
async def test_all_calls_of_a_run(drive, flags):
    assert await drive(flags) == CASES[flags]


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
