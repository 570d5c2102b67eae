"""An engine that answers HTTP as SGLang does and keeps what it was sent."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
import torch.distributed as dist

from miles.hf.checkpoint import CheckpointIndex
from miles.weight_sync.check import tensor_hash


class Engine:
    """Opens every rank's bucket, joins process groups, and records the calls.

    received: for each rank {name: tensor}. batches: the names of each bucket. times: (start, end) of each bucket.
    left: process groups that it was told to leave. resets: how often its weights were overwritten. fail_on: path whose
    calls answer 400. seconds: that taking a bucket lasts.
    """

    def __init__(self, tp_size=1, fail_on=None, seconds=0.0, running=0):
        self.calls, self.received, self.version = [], [{} for _ in range(tp_size)], None
        self.batches, self.times, self.pauses, self.groups = [], [], [], {}
        self.left, self.resets = [], 0
        self.seconds, self.running = seconds, running
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                engine.calls.append(self.path.split("?")[0])
                self.answer(200, {"loads": [{"num_running_reqs": engine.running, "num_waiting_reqs": 0}]})

            def do_POST(self):
                path = self.path.split("?")[0]
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
                engine.calls.append(path)
                status, answer = 400 if path == fail_on else 200, {"success": True}
                if status == 200 and path == "/weights_checker":
                    answer["ranks"] = engine.check(body["action"])
                elif status == 200:
                    engine.take(path, body)
                self.answer(status, answer)

            def answer(self, status, body):
                answer = json.dumps(body).encode()
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
        if path == "/pause_generation":
            self.pauses.append(body["mode"])
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/init_weights_update_group":
            assert body["backend"] == "gloo" and len(self.received) == 1
            self.groups[body["group_name"]] = join(body)
        if path == "/destroy_weights_update_group":
            self.left.append(body["group_name"])
        start = time.monotonic()
        if path == "/update_weights_from_tensor":
            assert body["load_format"] == "flattened_bucket" and body["flush_cache"] is False
            self.take_handles(body["serialized_named_tensors"])
        elif path == "/update_weights_from_disk":
            index = CheckpointIndex(body["model_path"])
            self.received[0] = {name: index.read(name).clone() for name in index.files}
            self.batches.append(list(index.files))
        elif path == "/update_weights_from_distributed":
            assert body["load_format"] == "flattened_bucket" and body["flush_cache"] is False
            self.take_broadcast(body)
        else:
            return
        time.sleep(self.seconds)
        self.times.append((start, time.monotonic()))

    def check(self, action):
        """What SGLang's weight checker does: hashes of what each rank holds, or zeros in its place."""
        if action == "checksum":
            return [{"checksums": {n: tensor_hash(t) for n, t in received.items()}} for received in self.received]
        self.resets += 1
        for received in self.received:
            for tensor in received.values():
                tensor.zero_()
        return []

    def take_handles(self, handles):
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        for received, handle in zip(self.received, handles, strict=True):
            bucket = FlattenedTensorBucket(**MultiprocessingSerializer.deserialize(handle))
            tensors = bucket.reconstruct_tensors()
            received.update({name: tensor.clone() for name, tensor in tensors})
        self.batches.append([name for name, _ in tensors])

    def take_broadcast(self, body):
        dtypes = [getattr(torch, name) for name in body["dtypes"]]
        sizes = [
            torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(body["shapes"], dtypes, strict=True)
        ]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        self.groups[body["group_name"]].broadcast([flat], dist.BroadcastOptions()).wait()
        pieces = zip(body["names"], flat.split(sizes), dtypes, body["shapes"], strict=True)
        self.received[0] |= {name: piece.view(dtype).view(shape) for name, piece, dtype, shape in pieces}
        self.batches.append(body["names"])

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def join(body):
    """The group that SGLang's `init_weights_update_group` makes, without torch's global state of this process."""
    address, port, size = body["master_address"], body["master_port"], body["world_size"]
    store = dist.TCPStore(address, port, size, False)
    # The prefixes that SGLang, and then torch, give it.
    for prefix in (body["group_name"], f"{body['group_name']}/", "cpu/"):
        store = dist.PrefixStore(prefix, store)
    return dist.ProcessGroupGloo(store, body["rank_offset"], size)
