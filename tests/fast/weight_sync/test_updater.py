"""Updating engines over real gloo groups; the engines answer HTTP as SGLang does. Each rank runs this file."""

import json
import sys
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from miles.backends.megatron_utils.hf import family_for, load_hf_config
from miles.backends.megatron_utils.hf.checkpoint_io import load_into
from miles.tools.make_tiny_checkpoint import make_tiny_checkpoint
from miles.weight_sync.gather import ParallelInfo, live
from miles.weight_sync.updater import EngineTarget, WeightUpdater
from tests.fast.weight_sync.conftest import StageModel, fall_asleep, no_group

MINUTE = timedelta(minutes=1)


class Engine:
    """An HTTP server with the calls of an update: opens every rank's bucket and records the calls.

    received: for each rank {name: tensor}. fail_on: path whose calls answer 400.
    """

    def __init__(self, tp_size, fail_on=None):
        self.calls, self.received, self.version = [], [{} for _ in range(tp_size)], None
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                path = self.path.split("?")[0]
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
                engine.calls.append(path)
                status = 400 if path == fail_on else 200
                if status == 200:
                    engine.take(path, body)
                answer = json.dumps({"success": True}).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def take(self, path, body):
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/update_weights_from_tensor":
            assert body["load_format"] == "flattened_bucket" and body["flush_cache"] is False
            for received, handle in zip(self.received, body["serialized_named_tensors"], strict=True):
                bucket = FlattenedTensorBucket(**MultiprocessingSerializer.deserialize(handle))
                received.update({name: tensor.clone() for name, tensor in bucket.reconstruct_tensors()})

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def make_engine():
    engines = []

    def make(tp_size=1, fail_on=None):
        engines.append(Engine(tp_size, fail_on))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def checkpoint(tmp_path):
    make_tiny_checkpoint(tmp_path / "model", hidden_size=32, num_layers=2, head_dim=8, intermediate_size=64)
    return tmp_path / "model"


def main(rank, world_size, store, folder, buffer_size, expected_error, *targets):
    """TP 2. A target is a URL and its source ranks, as `URL=0,1`."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    config = load_hf_config(folder)
    family = family_for(config)
    parallel = ParallelInfo(rank, world_size, lambda: dist.group.WORLD, 0, 1, no_group, [range(2)])
    model = StageModel(config, range(2), True, True, world_size)
    load_into(model, family, config, folder, range(2), rank, world_size, True, True)
    engines = [
        EngineTarget(url, len(ranks.split(",")), [int(r) for r in ranks.split(",")])
        for url, ranks in (target.split("=") for target in targets)
    ]

    def updater(flush_cache):
        group, size = dist.group.WORLD, int(buffer_size)
        return WeightUpdater(model, family, config, parallel, folder, engines, rank, group, size, flush_cache, MINUTE)

    try:
        metrics = updater(flush_cache=True).update(7, live)
    except RuntimeError as error:
        assert expected_error and expected_error in str(error), error
    else:
        assert not expected_error and metrics["perf/update_weights_tensors"] == 2 + 2 * 11
        # Again while the trainer sleeps and the engines' caches are away, with other values.
        read = fall_asleep(model)
        updater(flush_cache=False).update(8, lambda parameter: 2 * read(parameter))
        fail_to_read(rank, config, family, folder, engines)
    dist.barrier()


def fail_to_read(rank, config, family, folder, engines):
    """Two data-parallel ranks, of which one can't read its weights, as from a broken disk: both say so."""
    model = StageModel(config, range(2), True, True, 1)
    alone = ParallelInfo(0, 1, no_group, 0, 1, no_group, [range(2)])
    updater = WeightUpdater(
        model, family, config, alone, folder, engines, rank, dist.group.WORLD, 100_000, True, MINUTE
    )

    def read(parameter):
        if rank == 1:
            raise OSError("injected")
        return parameter.detach()

    with pytest.raises(RuntimeError, match="the weight update failed: trainer rank 1: injected"):
        updater.update(9, read)


def weights(folder):
    tensors = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    tensors.pop("lm_head.weight")
    return tensors


def test_each_rank_of_each_engine_gets_every_weight(run_ranks, make_engine, checkpoint):
    shared, one, two = make_engine(2), make_engine(), make_engine(2)
    targets = [f"{shared.url}=0,1", f"{one.url}=1", f"{two.url}=0,0"]
    run_ranks(__file__, 2, str(checkpoint), "20000", "", *targets)
    expected = weights(checkpoint)
    for engine in (shared, one, two):
        assert engine.version == "8"
        sends = engine.calls.count("/update_weights_from_tensor")
        assert sends > 6
        assert [call for call in engine.calls if call != "/update_weights_from_tensor"] == [
            "/pause_generation",
            "/flush_cache",
            "/update_weight_version",
            "/continue_generation",
            "/pause_generation",
            "/update_weight_version",
            "/continue_generation",
            # The one that a rank could not read.
            "/pause_generation",
            "/flush_cache",
            "/continue_generation",
        ]
        for received in engine.received:
            assert received.keys() == expected.keys()
            assert all(torch.equal(received[name], 2 * expected[name]) for name in expected)


def test_all_ranks_hear_of_one_engines_failure_and_all_engines_continue(run_ranks, make_engine, checkpoint):
    good, bad = make_engine(), make_engine(fail_on="/update_weights_from_tensor")
    run_ranks(
        __file__,
        2,
        str(checkpoint),
        "20000",
        f"trainer rank 1: {bad.url} did not take",
        f"{good.url}=0",
        f"{bad.url}=1",
    )
    for engine in (good, bad):
        assert engine.version is None and engine.calls[-1] == "/continue_generation"
        assert engine.calls.count("/update_weights_from_tensor") == 1


def test_source_ranks_must_be_one_a_rank():
    with pytest.raises(ValueError, match="2 ranks, but source_ranks=.0."):
        EngineTarget("http://engine", 2, [0])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), *sys.argv[5:])
