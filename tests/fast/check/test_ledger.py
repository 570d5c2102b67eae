"""Ledgers against what was measured on one H200 (benchmarks/results), and what moves where in each way to share."""

import json

import pytest

from miles.check.contents import GROUP_BYTES, TRAINER_CONTEXT, Item, sync_bytes
from miles.check.hardware import HARDWARE
from miles.check.ledger import TRAINER_PROCESS, Ledger, ledger_of
from miles.check.seconds import durations
from miles.check.walk import Column
from tests.fast.check.conftest import DENSE, QWEN3_30B
from tests.fast.conftest import ROOT

H200 = HARDWARE["H200"]
GB = 1e9


def result_of(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def one_gpu(configured, size: str, flags: str = "") -> Ledger:
    return ledger_of(configured(DENSE[size], f"--actor-num-gpus-per-node 1 {flags}"), H200)


def trainer(ledger: Ledger):
    (device,) = (device for device in ledger.devices if device.stage == 0)
    return device.walk


FLAGS = {
    "host": "",
    "rematerialise": "--rematerialize-param-from-master-weight",
    "disk": "--offload-train-target disk --offload-train-disk-dir .",
}


def test_sleep_and_wake_as_measured(configured):
    """Bytes that move exactly, host memory and seconds within 5 and 15 %."""
    result = result_of("sleep_wake")
    for row in result["rows"]:
        label, verb = row["what"].split(": ")
        size, way = label.removesuffix(", first").split()
        ledger = one_gpu(configured, size, FLAGS[way])
        walk, parameters = trainer(ledger), result["notes"][f"{size} parameters"]
        assert ledger.model.parameters == parameters
        copied = walk.copied["out" if verb == "sleep" else "in"]
        assert copied == row["B/parameter"] * parameters, row["what"]
        host = (
            TRAINER_PROCESS
            + walk.pinned[Column.GENERATE]
            + ledger.host.memory.get("staging for the disk", {}).get(Column.GENERATE, 0.0)
        )
        assert host / GB == pytest.approx(row["host GB"], rel=0.05), row["what"]
        if size != "7B":  # which took no step before it slept
            assert row["GPU GB asleep"] == pytest.approx(TRAINER_CONTEXT / GB, rel=0.05)
        if "first" not in label and way == "host":
            (seconds,) = (one.seconds for one in durations(ledger) if one.phase == verb.removesuffix("_up"))
            assert seconds == pytest.approx(row["s"], rel=0.15), row["what"]


def test_buckets_of_a_sync_as_measured(configured):
    """No more is taken than counted, and where buckets are of one size no less than 90 % of it."""
    for row in result_of("weight_sync")["rows"]:
        size, bucket = row["what"].split(", ")
        if size not in DENSE or not bucket.endswith("MiB"):
            continue
        mib = int(bucket.removesuffix(" MiB"))
        config = configured(DENSE[size], f"--update-weight-buffer-size {mib * 2**20} --actor-num-gpus-per-node 1")
        counted = sync_bytes(config, ledger_of(config, H200).model) / GB
        assert row["extra GB"] <= counted * 1.02, row["what"]
        assert row["extra GB"] >= counted * 0.9, row["what"]


def test_peak_of_a_step_as_measured(configured):
    """All that torch's allocator held, within 1 %, through flags alone."""
    for row in result_of("train_step")["rows"]:
        samples = row["tokens"] // 2048
        flags = "" if row["flags"] == "-" else row["flags"]
        config = configured(DENSE[row["size"]], f"--actor-num-gpus-per-node 1 --micro-batch-size {samples} {flags}")
        held = trainer(ledger_of(config, H200)).gpu[Column.TRAIN]
        allocated = sum(size for item, size in held.items() if item is not Item.CONTEXT)
        assert allocated / GB == pytest.approx(row["peak GB"], rel=0.01), row


def test_states_are_shared_out(configured):
    """Weights and gradients by tensor and pipeline parallelism, masters and moments by data parallelism as well."""
    ledger = ledger_of(configured(DENSE["8B"], "--tensor-model-parallel-size 2 --sequence-parallel"), H200)
    held, parameters = trainer(ledger).gpu[Column.SAVE], ledger.model.parameters
    assert held[Item.WEIGHTS] == pytest.approx(2 * parameters / 2, rel=1e-3)
    assert held[Item.GRADIENTS] == 2 * held[Item.WEIGHTS]
    assert held[Item.MASTERS] == held[Item.GRADIENTS] / 4
    assert held[Item.MOMENTS] == 2 * held[Item.MASTERS]
    plain = ledger_of(configured(DENSE["8B"], "--no-use-distributed-optimizer"), H200)
    assert trainer(plain).gpu[Column.SAVE][Item.MOMENTS] == 8 * parameters
    fp32 = ledger_of(configured(DENSE["0.6B"], "--no-bf16"), H200)
    states = trainer(fp32).gpu[Column.SAVE]
    assert (states[Item.WEIGHTS], states[Item.MASTERS]) == (4 * fp32.model.parameters, 0)


def test_experts_are_shared_out_by_their_own_ranks(configured):
    flags = "--expert-model-parallel-size 4"
    ledger = ledger_of(configured(QWEN3_30B, flags), H200)
    experts = 48 * 128 * 3 * 2048 * 768
    (stage,) = ledger.model.stages
    assert stage.experts == experts // 4
    assert stage.dense == ledger.model.parameters - experts
    held = trainer(ledger).gpu[Column.SAVE]
    # Of eight ranks two have the same experts, and all the same of the rest.
    assert held[Item.MASTERS] == 4 * (stage.experts / 2 + stage.dense / 8)


def test_stages_together_hold_the_model(configured):
    whole = ledger_of(configured(DENSE["8B"]), H200).model.parameters
    config = configured(DENSE["8B"], "--pipeline-model-parallel-size 4")
    stages = ledger_of(config, H200).model.stages
    assert sum(stage.parameters for stage in stages) == whole
    assert [len(chunk) for stage in stages for chunk in stage.chunks] == [9] * 4


def test_the_first_stage_holds_most_activations(configured):
    flags = "--pipeline-model-parallel-size 4 --actor-num-gpus-per-node 4 --micro-batch-size 1"
    ledger = ledger_of(configured(DENSE["8B"], flags), H200)
    held = {device.stage: device.walk.gpu[Column.TRAIN] for device in ledger.devices}
    activations = [held[stage][Item.ACTIVATIONS] for stage in range(4)]
    assert activations == sorted(activations, reverse=True)
    assert activations[0] > 3.5 * activations[3]
    assert [bool(held[stage][Item.LOGITS]) for stage in range(4)] == [False, False, False, True]


def test_in_turns_one_side_leaves_before_the_other_comes(configured):
    walk = trainer(ledger_of(configured(DENSE["8B"]), H200))
    assert walk.gpu[Column.TRAIN].get(Item.ENGINE_WEIGHTS, 0) == 0
    assert walk.gpu[Column.WAKE].get(Item.ENGINE_WEIGHTS, 0) == 0
    assert walk.gpu[Column.GENERATE].get(Item.WEIGHTS, 0) == 0
    away = (Item.WEIGHTS, Item.MASTERS, Item.MOMENTS)
    assert walk.pinned[Column.GENERATE] == sum(walk.gpu[Column.SAVE][item] for item in away)


def test_with_the_peak_on_the_gpu_both_are_there(configured):
    walk = trainer(ledger_of(configured(DENSE["8B"], "--colocate-memory-peak-device gpu"), H200))
    for column in (Column.WAKE, Column.SYNC):
        assert walk.gpu[column][Item.ENGINE_WEIGHTS] and walk.gpu[column][Item.MOMENTS], column
        assert not walk.gpu[column].get(Item.KV_POOL)
    assert not walk.gpu[Column.TRAIN].get(Item.ENGINE_WEIGHTS)


def test_what_does_not_leave_is_there_all_the_time(configured):
    walk = trainer(ledger_of(configured(DENSE["0.6B"], "--no-offload-train --no-offload-rollout"), H200))
    for column in (Column.GENERATE, Column.TRAIN):
        assert walk.gpu[column][Item.KV_POOL] and walk.gpu[column][Item.MOMENTS]
    assert not any(walk.pinned.values()) and not walk.copied


def test_host_buffers_that_are_given_back(configured):
    kept = trainer(ledger_of(configured(DENSE["8B"]), H200)).pinned
    given = trainer(ledger_of(configured(DENSE["8B"], "--no-offload-train-keep-host-buffers"), H200)).pinned
    assert given[Column.GENERATE] == kept[Column.TRAIN] > 0
    assert given[Column.TRAIN] == 0


def test_the_disk_takes_what_the_host_had(configured):
    ledger = ledger_of(configured(DENSE["8B"], FLAGS["disk"]), H200)
    assert not any(trainer(ledger).pinned.values())
    assert ledger.host.disk["the sleeping trainer"] == pytest.approx(ledger.model.parameters * (8 * 2 + 12))


@pytest.mark.parametrize(("dtype", "each"), [("fp32", 12), ("bf16", 8), ("fp8e4m3", 6)])
def test_a_streamed_optimizer(configured, dtype, each):
    flags = f"--stream-optimizer-state-to-disk --offload-train-disk-dir . --stream-optimizer-state-moment-dtype {dtype}"
    ledger = ledger_of(configured(DENSE["8B"], flags), H200)
    assert Item.MOMENTS not in trainer(ledger).gpu[Column.SAVE]
    assert ledger.host.disk["the streamed optimizer"] == pytest.approx(each * ledger.model.parameters, rel=0.01)
    assert "optimizer" in {duration.phase for duration in durations(ledger)}


def test_gpus_of_their_own(configured):
    """Each side has its own kind of device; nothing moves, and the engine's is full of keys and values."""
    ledger = ledger_of(configured(DENSE["8B"], "--rollout-num-gpus 4 --actor-num-gpus-per-node 4", shared=False), H200)
    by_name = {device.name: device for device in ledger.devices}
    assert {name: device.count for name, device in by_name.items()} == {"GPU of the trainer": 4, "GPU of an engine": 4}
    assert Item.KV_POOL not in by_name["GPU of the trainer"].walk.gpu[Column.TRAIN]
    engine = by_name["GPU of an engine"].walk.gpu
    assert engine[Column.GENERATE][Item.KV_POOL] and Item.WEIGHTS not in engine[Column.GENERATE]
    assert engine[Column.SYNC][Item.BUCKETS] == 2**29
    assert not any(device.walk.copied for device in ledger.devices)


def test_a_critic_is_a_second_trainer(configured):
    alone = ledger_of(configured(DENSE["8B"]), H200)
    both = ledger_of(configured(DENSE["8B"], "--advantage-estimator ppo"), H200)
    head = 14 * 151936 * 4096
    pinned = trainer(both).pinned[Column.GENERATE] + head * (2 + 12 / 8) / 14
    assert pinned == pytest.approx(2 * trainer(alone).pinned[Column.GENERATE], rel=1e-4)


def test_copies_of_weights_on_the_host(configured, tmp_path):
    line = "copies of weights (reference, teacher, old policy)"
    flags = "--use-kl-loss --keep-old-actor --kl-loss-coef 0.1"
    ledger = ledger_of(configured(DENSE["8B"], flags), H200)
    assert ledger.host.memory[line][Column.TRAIN] == 2 * 8 * 2 * ledger.model.parameters
    assert line not in ledger_of(configured(DENSE["8B"]), H200).host.memory


def test_an_engine_in_fp8(configured):
    """Projections at a byte and a scale for each block, embedding and output layer as they are."""
    plain, fp8 = (ledger_of(configured(DENSE["8B"], flags), H200).engine for flags in ("", "--rollout-fp8"))
    outside = 2 * 2 * 151936 * 4096
    projections = (plain.weights - outside) / 2
    assert fp8.weights == pytest.approx(outside + projections * (1 + 4 / 128**2), rel=1e-6)


def test_the_pool_of_an_engine(configured):
    """8 heads of 128, keys and values of 36 layers, in bf16: 147,456 bytes a token; half with half of the heads."""
    config = configured(DENSE["8B"], "--sglang-mem-fraction-static 0.5")
    engine = ledger_of(config, H200).engine
    assert engine.kv_pool + engine.weights == pytest.approx(0.5 * H200.memory, rel=0.02)
    assert engine.tokens == int(engine.kv_pool / (2 * 2 * 36 * 8 * 128))
    two = ledger_of(configured(DENSE["8B"], "--rollout-num-gpus-per-engine 2 --sglang-max-total-tokens 1000"), H200)
    assert (two.engine.tokens, two.engine.kv_pool) == (1000, 1000 * 2 * 36 * 8 * 128)


def test_groups_of_one_rank_take_nothing(configured):
    held = trainer(one_gpu(configured, "0.6B")).gpu[Column.SAVE]
    assert held[Item.COMMUNICATION] == 0
    held = trainer(ledger_of(configured(DENSE["8B"]), H200)).gpu[Column.SAVE]
    assert held[Item.COMMUNICATION] == 2 * GROUP_BYTES  # data-parallel ranks, and the world


def test_a_critic_sleeps_and_wakes_as_well(configured):
    alone = trainer(ledger_of(configured(DENSE["8B"]), H200)).copied
    both = trainer(ledger_of(configured(DENSE["8B"], "--advantage-estimator ppo"), H200)).copied
    assert alone["in"] == alone["out"] and both["in"] == both["out"] > 1.8 * alone["in"]


@pytest.mark.parametrize(
    ("flags", "columns"),
    [
        ("--debug-rollout-only", [Column.ENGINES_UP, Column.GENERATE]),
        ("--debug-train-only --loss-type sft_loss", [Column.BUILT, Column.TRAIN, Column.SAVE]),
    ],
)
def test_one_half_of_a_run(configured, flags, columns):
    (device,) = ledger_of(configured(DENSE["0.6B"], flags), H200).devices
    assert list(device.totals) == columns
