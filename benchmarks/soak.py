"""A long rollout through two real SGLang engines, one of which is killed midway: nothing lost, nothing doubled.

    python benchmarks/soak.py [--requests 20000] [--json PATH]

A tiny random model on a CPU, few tokens a sample: the engines are busy with requests, not with a model. Miles' own
side runs as in train.py: data source, Collector with over-sampling and partial rollout, EnginePool. A request asks for
one group. When half of them have been answered, the first engine's server gets SIGKILL while it is at work.

It fails unless every sample that was asked for is there exactly once, trained on or waiting to go on with, each trained
one is finished and rewarded, and the memory of this process stays within --memory-bound MiB of what it was after the
warm-up (the first tenth). A line of the table is a tenth of the run.
"""

import argparse
import asyncio
import gc
import os
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from common import Row, parser, report
from transformers import AutoTokenizer

from miles.backends.sglang_utils.arguments import PORTS_OF_A_SERVER
from miles.backends.sglang_utils.engine import SGLangEngine
from miles.backends.sglang_utils.server_process import ServerDied
from miles.config import RunConfig
from miles.engines.client import SGLangClient
from miles.rollout.collector import Collector
from miles.rollout.engine_pool import EnginePool
from miles.rollout.hooks import load_hooks
from miles.rollout.prompts.data_source import RolloutDataSource
from miles.tools.make_prompts import make_prompts
from miles.tools.make_tiny_checkpoint import make_tiny_checkpoint
from miles.utils.arguments import parse_args
from miles.utils.network import port_slices
from miles.utils.types import Sample

PARTS = 10
SAMPLES_PER_PROMPT = 2
MOST_TOKENS = 4
KILL_TIMEOUT_SECONDS = 60.0


@dataclass
class Part:
    """A tenth of the run."""

    requests: int
    seconds: float
    rss_mib: float
    metrics: Counter


class Accounts:
    """Every sample by its index: how often it was trained on."""

    def __init__(self) -> None:
        self._trained: Counter[int] = Counter()

    def book(self, groups: list[list[Sample]]) -> None:
        """Book the groups of a rollout. Raises RuntimeError for one that is not whole, finished and rewarded."""
        for group in groups:
            done = all(s.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED) for s in group)
            rewarded = all(s.reward == s.response_length > 0 for s in group)
            if len(group) != SAMPLES_PER_PROMPT or not done or not rewarded:
                raise RuntimeError(f"this group is not to be trained on: {group}")
            for sample in group:
                sample.validate()
                self._trained[sample.index] += 1

    def check(self, asked: int, waiting: list[int]) -> None:
        """Raise unless the indices from 0 to `asked` are trained on or waiting, each exactly once."""
        found = self._trained + Counter(waiting)
        lost = [index for index in range(asked) if found[index] == 0]
        doubled = {index: count for index, count in found.items() if count > 1}
        foreign = [index for index in found if not 0 <= index < asked]
        if lost or doubled or foreign:
            raise RuntimeError(f"of {asked} samples: lost {lost[:20]}, doubled {doubled}, foreign {foreign[:20]}")


async def reward(config: RunConfig, sample: Sample) -> float:
    """--custom-rm-path: says that it has seen this very response."""
    return float(sample.response_length)


def run_config(folder: Path, groups: int) -> RunConfig:
    """Two CPU engines and no trainer."""
    make_tiny_checkpoint(folder / "model", hidden_size=64, num_layers=2, head_dim=16, intermediate_size=128)
    make_prompts("addition", 1000, folder / "prompts.jsonl", seed=0)
    flags = f"--device cpu --debug-rollout-only --rollout-num-gpus 2 --num-rollout 1 --rollout-batch-size {groups}"
    flags += f" --over-sampling-batch-size {groups + groups // 5} --partial-rollout --apply-chat-template"
    flags += f" --n-samples-per-prompt {SAMPLES_PER_PROMPT} --rollout-max-response-len {MOST_TOKENS}"
    flags += " --custom-rm-path soak.reward --sglang-max-total-tokens 8192"
    files = ["--hf-checkpoint", str(folder / "model"), "--prompt-data", str(folder / "prompts.jsonl")]
    return parse_args([*flags.split(), *files, "--run-dir", str(folder / "run")])


async def kill_at_work(client: SGLangClient) -> None:
    """SIGKILL to the server of `client`, once it is at work."""
    deadline = time.monotonic() + KILL_TIMEOUT_SECONDS
    while not await client.running_requests():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{client.url} had nothing to do for {KILL_TIMEOUT_SECONDS:g} s")
    port = urlsplit(client.url).port
    (server,) = {c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port}
    print(f"SIGKILL to {server}, the server of {client.url}", flush=True)
    os.kill(server, signal.SIGKILL)


async def soak(config: RunConfig, engines: list[SGLangEngine], urls: list[str], requests: int) -> list[Part]:
    """The whole run; raises RuntimeError where a sample is lost or doubled."""
    clients = [SGLangClient(url) for url in urls]

    async def check_engines() -> dict[SGLangClient, BaseException]:
        dead = {}
        for client, engine in zip(clients, engines, strict=True):
            try:
                engine.check()
            except ServerDied as error:
                dead[client] = error
        return dead

    tokenizer = AutoTokenizer.from_pretrained(config.hf_checkpoint)
    pool = EnginePool(config, clients, config.sglang_server_concurrency, tokenizer, check_engines)
    data = RolloutDataSource(config, tokenizer)
    collector = Collector(config, data, pool, load_hooks(config, tokenizer), None)
    accounts, parts, rollouts = Accounts(), [], requests // config.rollout_batch_size
    killing = None
    for part in range(PARTS):
        begin, metrics = time.monotonic(), Counter()
        rollout_ids = range(part * rollouts // PARTS, (part + 1) * rollouts // PARTS)
        for rollout_id in rollout_ids:
            if rollout_id == rollouts // 2:
                killing = asyncio.create_task(kill_at_work(clients[0]))
            collected = await collector.collect(rollout_id, 0)
            if len(collected.groups) != config.rollout_batch_size:
                raise RuntimeError(f"rollout {rollout_id} has {len(collected.groups)} groups")
            accounts.book(collected.groups)
            metrics.update(collected.metrics)
        if killing is not None and killing.done():
            killing.result()
        gc.collect()
        rss = psutil.Process().memory_info().rss / 2**20
        parts.append(Part(len(rollout_ids) * config.rollout_batch_size, time.monotonic() - begin, rss, metrics))
        print(f"{part + 1} of {PARTS}: {parts[-1].seconds:.0f} s, {rss:.0f} MiB", flush=True)
    await killing
    if len(await check_engines()) != 1:
        raise RuntimeError("one engine was to be dead in the end")
    position, state = data.state_dict(), collector.state_dict()
    waiting = [sample["index"] for kind in ("finished", "unfinished") for group in state[kind] for sample in group]
    accounts.check(position["sample_index"], waiting)
    for client in clients:
        await client.close()
    return parts


def check_memory(parts: list[Part], bound_mib: float) -> float:
    """MiB that the process grew after the warm-up; RuntimeError above the bound."""
    growth = parts[-1].rss_mib - parts[0].rss_mib
    if growth > bound_mib:
        raise RuntimeError(
            f"memory grew by {growth:.0f} MiB after the warm-up: {[round(part.rss_mib) for part in parts]}"
        )
    return growth


def row_of(number: int, part: Part) -> Row:
    return {
        "part": str(number),
        "requests": part.requests,
        "s": part.seconds,
        "req/s": part.requests / part.seconds,
        "sent again": int(part.metrics["rollout/request_retries"]),
        "surplus": int(part.metrics["rollout/groups/surplus"]),
        "cut off": int(part.metrics["rollout/groups/unfinished"]),
        "RSS MiB": part.rss_mib,
    }


def run(options: argparse.Namespace) -> tuple[list[Part], float]:
    """Start the engines, run, and check."""
    with tempfile.TemporaryDirectory() as folder:
        config = run_config(Path(folder), options.requests // (PARTS * options.rollouts_a_part))
        engines = [
            SGLangEngine(config, rank, [], ports=ports) for rank, ports in enumerate(port_slices(2, PORTS_OF_A_SERVER))
        ]
        try:
            urls = [engine.start() for engine in engines]
            parts = asyncio.run(soak(config, engines, urls, options.requests))
        finally:
            for engine in engines:
                engine.shutdown()
    return parts, check_memory(parts, options.memory_bound)


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("--requests", type=int, default=20_000, help="answered requests (default 20000)")
    cli.add_argument("--rollouts-a-part", type=int, default=8, help="rollouts in a tenth of the run (default 8)")
    cli.add_argument("--memory-bound", type=float, default=10.0, metavar="MIB", help="growth allowed (default 10)")
    options = cli.parse_args()
    parts, growth = run(options)
    notes = {
        "requests": sum(part.requests for part in parts),
        "samples": sum(part.requests for part in parts) * SAMPLES_PER_PROMPT,
        "lost": 0,
        "doubled": 0,
        "MiB grown": growth,
    }
    report("Two engines, one killed midway", [row_of(i + 1, part) for i, part in enumerate(parts)], notes, options.json)


if __name__ == "__main__":
    main()
