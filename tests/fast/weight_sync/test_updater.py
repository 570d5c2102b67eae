"""Updating engines over real gloo groups; the engines answer HTTP as SGLang does. Each rank runs this file."""

import json
import sys
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from miles.backends.megatron_utils.weight_source import MegatronWeights
from miles.hf.checkpoint import CheckpointIndex
from miles.hf.config import load_hf_config
from miles.utils.agreement import Agreement
from miles.utils.errors import one_line
from miles.weight_sync.live_bytes import LiveBytes
from miles.weight_sync.source import live
from miles.weight_sync.target import EngineTarget
from miles.weight_sync.updater import TrainerRank, WeightUpdater
from tests.fast.weight_sync.conftest import (
    ExpertFamily,
    expert_checkpoint,
    expert_chunk,
    fall_asleep,
    grid,
    sync_settings,
)
from tests.fast.weight_sync.fake_engine import Engine

LIMIT = 20_000  # of some 55,000 bytes


@pytest.fixture
def make_engine():
    engines = []

    def make(*args, **kwargs):
        engines.append(Engine(*args, **kwargs))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def checkpoint(tmp_path):
    expert_checkpoint(tmp_path / "model")
    return tmp_path / "model"


def target(engine, sources=None):
    """What EngineTarget takes; a remote engine has no sources."""
    return [engine.url, len(engine.received), sources]


def build(folder, parallel, rank, targets, limit=LIMIT, engine_format=None, **changes):
    chunks = [expert_chunk(CheckpointIndex(folder), parallel, n) for n in range(len(parallel.chunk_layers[0]))]
    source = MegatronWeights(
        chunks, ExpertFamily(), load_hf_config(folder), parallel, CheckpointIndex(folder), copies=True
    )
    trainer = TrainerRank(rank, Agreement(dist.group.WORLD), "127.0.0.1", timedelta(minutes=1))
    engines = [EngineTarget(*each) for each in targets]
    settings = sync_settings(folder, buffer_size=limit, **changes)
    return WeightUpdater(source, engines, trainer, settings, engine_format), chunks


def update(updater, version, read):
    """One update of the weights as `read` gives them."""
    updater.source.read = read
    updater.update(version)


@pytest.fixture
def one_process(checkpoint):
    """Makes the updater of a trainer of one rank: `one_process(targets, ...)`."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield lambda targets, **changes: build(checkpoint, grid(lambda _: None, 0, 1), 0, targets, **changes)
    dist.destroy_process_group()


def main(rank, world_size, store, folder, task):
    """task: {sizes, targets, updates: [[error or "", changes]]}; one update each, of weights times the version."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    task = json.loads(task)
    parallel = grid(dist.new_group, rank, world_size, **task["sizes"])
    updater, chunks = build(folder, parallel, rank, task["targets"], **task["changes"])
    for version, expected in enumerate(task["updates"], 1):
        # The last one is from the sleep.
        read = fall_asleep(*chunks) if version == len(task["updates"]) else live
        started, error = time.monotonic(), ""
        try:
            update(updater, version, lambda *part, read=read, version=version: read(*part) * version)
        except Exception as failure:
            error = one_line(failure)
        assert expected in error and bool(expected) == bool(error), error
        assert time.monotonic() - started < 30, "it took the timeout of a group"
        dist.barrier()


def run(run_ranks, world_size, folder, targets, updates=("",), sizes=None, **changes):
    task = {"sizes": sizes or {}, "targets": targets, "updates": updates, "changes": changes}
    run_ranks(__file__, world_size, str(folder), json.dumps(task))


def check(engine, folder, factor):
    index = CheckpointIndex(folder)
    for received in engine.received:
        assert received.keys() == index.files.keys()
        for name, tensor in received.items():
            expected = index.read(name)
            assert tensor.dtype == expected.dtype and torch.equal(tensor, expected * factor), name


OPEN = ["/flush_cache", "/pause_generation"]
CLOSE = ["/update_weight_version", "/continue_generation"]


def test_colocated_and_remote_engines_in_one_update(run_ranks, make_engine, checkpoint):
    shared, one, two, remote, another = make_engine(2), make_engine(), make_engine(2), make_engine(), make_engine()
    targets = [target(shared, [0, 1]), target(one, [1]), target(two, [0, 0]), target(remote), target(another)]
    run(run_ranks, 2, checkpoint, targets, ["", ""], dict(tp=2), flush_cache=False)
    for engine in (shared, one, two, remote, another):
        assert engine.version == "2" and engine.pauses == ["retract"] * 2
        check(engine, checkpoint, 2)
        sends = [call for call in engine.calls if call.startswith("/update_weights_from")]
        assert len(sends) == len(engine.batches) >= 4 and len(set(sends)) == 1
        # The caches of colocated engines are away; the group of the remote ones is made once.
        before = OPEN if engine in (remote, another) else OPEN[1:]
        join = ["/init_weights_update_group"] if engine in (remote, another) else []
        assert [call for call in engine.calls if call not in sends] == before + join + CLOSE + before + CLOSE


@pytest.mark.parametrize("sizes", [dict(pp=2), dict(pp=2, ep=2, chunks=2)])
def test_a_group_a_pipeline_stage(run_ranks, make_engine, checkpoint, sizes):
    engine = make_engine()
    run(run_ranks, 2 * sizes.get("ep", 1), checkpoint, [target(engine)], sizes=sizes)
    check(engine, checkpoint, 1)
    assert sorted(name[:10] for name in engine.groups) == ["miles-pp_0", "miles-pp_1"]


def test_through_a_folder(run_ranks, make_engine, checkpoint, tmp_path):
    local, remote = make_engine(), make_engine()
    folder = tmp_path / "shared"
    folder.mkdir()
    run(
        run_ranks,
        2,
        checkpoint,
        [target(local, [1]), target(remote)],
        ["", ""],
        dict(pp=2),
        transfer_mode="disk",
        disk_folder=str(folder),
    )
    for engine in (local, remote):
        assert engine.version == "2"
        check(engine, checkpoint, 2)
    assert remote.calls.count("/update_weights_from_disk") == 2 and list(folder.iterdir()) == []


@pytest.mark.parametrize("kind", ["local", "remote", "disk"])
def test_all_ranks_hear_of_one_engines_failure_and_what_holds_two_versions_stays_paused(
    run_ranks, make_engine, checkpoint, tmp_path, kind
):
    path = {"local": "tensor", "remote": "distributed", "disk": "disk"}[kind]
    good, bad = make_engine(), make_engine(fail_on=f"/update_weights_from_{path}")
    tensors = 86 if kind == "disk" else 26
    error = f"{bad.url} did not take a bucket of {tensors} tensors, model.layers.0.router_bias to "
    targets = [target(good, [0]), target(bad, [1] if kind == "local" else None)]
    changes = dict(transfer_mode="disk", disk_folder=str(tmp_path / "shared")) if kind == "disk" else {}
    run(run_ranks, 2, checkpoint, targets, [error] * 2, **changes)
    for engine in (good, bad):
        assert engine.version is None and "/continue_generation" not in engine.calls
    assert not list(tmp_path.glob("shared/*"))
    # Another group for another try: the last one may be broken.
    assert len(bad.groups) == (2 if kind == "remote" else 0)
    assert bad.left == list(bad.groups)


def test_an_engine_that_joins_no_group_is_not_waited_for(run_ranks, make_engine, checkpoint):
    bad = make_engine(fail_on="/init_weights_update_group")
    run(run_ranks, 1, checkpoint, [target(bad)], [f"{bad.url}/init_weights_update_group: HTTP 400"])
    assert bad.calls[-1] == "/continue_generation"


def test_the_port_of_a_group_is_open_on_the_address_alone(one_process, make_engine):
    engine = make_engine()
    updater, _ = one_process([target(engine)])
    update(updater, 1, live)
    (name,) = engine.groups
    opened = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in opened if address.port == int(name.rpartition("-")[2])] == ["127.0.0.1"]


def test_runs_that_share_a_disk_folder_do_not_meet(one_process, make_engine, tmp_path):
    engine, folder = make_engine(), tmp_path / "shared"
    changes = dict(transfer_mode="disk", disk_folder=str(folder))
    (updater, _), (another, _) = one_process([target(engine)], **changes), one_process([target(engine)], **changes)
    seen = []

    def read(parameter, expert=None):
        if not seen:
            seen.append(list(folder.iterdir()))
            update(another, 1, live)
            assert list(folder.iterdir()) == seen[0]
        return live(parameter, expert) * 2

    update(updater, 2, read)
    assert len(seen[0]) == 1 and list(folder.iterdir()) == []
    assert engine.version == "2"


def test_a_rank_that_can_not_read_says_so(one_process, make_engine):
    engine = make_engine()
    updater, _ = one_process([target(engine, [0])])

    def read(parameter, expert=None):
        raise OSError("injected")

    with pytest.raises(OSError, match="injected") as caught:
        update(updater, 1, read)
    assert caught.value.__notes__ == ["embedding.weight could not be read"]
    assert engine.calls == [*OPEN, "/continue_generation"]


@pytest.mark.parametrize("remote", [False, True])
def test_a_bucket_is_made_while_an_engine_takes_the_last(one_process, make_engine, remote):
    engine = make_engine(seconds=0.1)
    updater, _ = one_process([target(engine, None if remote else [0])])
    reads = []

    def read(parameter, expert=None):
        time.sleep(0.003)  # the engine hears of a bucket a moment after it was sent
        reads.append(time.monotonic())
        return live(parameter, expert)

    update(updater, 1, read)
    assert len(engine.times) >= 3
    for start, end in engine.times[:-1]:
        assert any(start < moment < end for moment in reads)
    # And never while it takes the one before that.
    assert all(end <= start for (_, end), (start, _) in pairwise(engine.times))


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("limit", [LIMIT, 7_000])
def test_memory_is_two_buckets(one_process, make_engine, limit, remote):
    """Awake and asleep, also where the two largest buckets don't fit beside each other."""
    engine = make_engine(seconds=0.02)
    updater, chunks = one_process([target(engine, None if remote else [0])], limit=limit)
    buckets = updater.gatherer.buckets
    largest = max(bucket.capacity + bucket.scratch for bucket in buckets)
    assert len(buckets) >= 3
    for read in (lambda: live, lambda: fall_asleep(*chunks)):
        values = read()
        with LiveBytes() as counted:
            update(updater, 1, values)
        assert largest < counted.peak <= 2 * limit


def test_what_belongs_together_is_sent_together(one_process, make_engine, checkpoint):
    """Also where it takes more than a bucket, which then waits for the last one to be taken."""
    engine = make_engine(seconds=0.02)
    updater, _ = one_process([target(engine, [0])], limit=2_000)
    with LiveBytes() as counted:
        update(updater, 1, live)
    check(engine, checkpoint, 1)
    buckets = updater.gatherer.buckets
    largest = max(bucket.capacity + bucket.scratch for bucket in buckets)
    assert largest > 2_000 and counted.peak <= max(largest, 4_000)
    for layer in range(4):
        names = {f"model.layers.{layer}.{part}.weight" for part in ("q_a", "q_a_norm", "kv_a")}
        assert sum(names <= set(batch) for batch in engine.batches) == 1
    assert [name for batch in engine.batches for name in batch] == [name for b in buckets for name in b.slots]


def test_source_ranks_must_be_one_a_rank():
    with pytest.raises(ValueError, match="2 ranks, but source_ranks=.0."):
        EngineTarget("http://engine", 2, [0])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5])
