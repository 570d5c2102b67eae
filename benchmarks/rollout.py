"""What Miles adds to a rollout over raw SGLang calls: seconds of the same requests, sent by a bare client and by Miles.

    python benchmarks/rollout.py [--json PATH]                                      # a CPU, a tiny random model
    python benchmarks/rollout.py --model SMOLLM2 --device cuda [--json PATH]        # one GPU
    python benchmarks/rollout.py --stand-in 8 [--json PATH]                         # no engine: what Miles adds alone

One real SGLang server. A repetition is raw, Miles, raw, on prompts that no repetition had before, with an empty prefix
cache each time. Every sample has a length of its own, drawn evenly from --min-tokens to --max-tokens, and no end token
ends it: both sides have the server write the same number of tokens, which is checked.

- raw: aiohttp sends one prepared body a group, as Miles sends them and as many at once, and reads the answers' bytes;
- Miles: data source, Collector, GroupRunner and EnginePool, from prompts to rewarded samples; the reward is a function
  of the user's own that looks at the length.

overhead is Miles' seconds over the mean of the two raw runs beside it; noise is the second raw run over the first. The
parts are CPU seconds of our process for one rollout: mostly they pass while the server computes. Each was measured
alone, on the answers of the last repetition.

Engines differ from run to run by more than Miles adds. --stand-in MS takes a server in their place that computes
nothing and lets a request wait MS milliseconds a token (stand_in_server.py), with as many samples as on a GPU.
"""

import asyncio
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from common import Row, parser, report
from transformers import AutoTokenizer

from miles.backends.sglang_utils.engine import SGLangEngine
from miles.backends.sglang_utils.server_process import ServerDied, ServerProcess
from miles.config import RunConfig
from miles.engines.client import SGLangClient
from miles.rewards.compute import compute_rewards
from miles.rollout.answers import end_token_ids
from miles.rollout.collector import Collector
from miles.rollout.engine_pool import EnginePool
from miles.rollout.generate import Sampling
from miles.rollout.hooks import load_hooks
from miles.rollout.prompts.data_source import RolloutDataSource
from miles.tools.make_prompts import make_prompts
from miles.tools.make_tiny_checkpoint import make_tiny_checkpoint
from miles.utils.arguments import parse_args
from miles.utils.garbage import collect_rarely
from miles.utils.network import free_port
from miles.utils.types import Sample

# Groups, samples in flight, fewest and most tokens of a response.
SIZES = {"cpu": (32, 128, 16, 64), "cuda": (256, 512, 128, 512)}
SAMPLES_PER_PROMPT = 8
GPU_SERVER = (
    "--sglang-mem-fraction-static 0.5 --sglang-attention-backend triton --sglang-sampling-backend pytorch "
    "--sglang-cuda-graph-backend-prefill disabled --sglang-cuda-graph-max-bs-decode 512 "
    "--sglang-max-running-requests 512"
)


async def reward(config: RunConfig, sample: Sample) -> float:
    """--custom-rm-path of Miles' side: as little as a reward can do."""
    return float(sample.response_length % 2)


class Lengths:
    """The length of each response, by the seed that Miles gives the sample: the same for both sides."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._span = shortest, longest - shortest + 1

    def fixed(self, parameters: list[dict[str, object]]) -> list[dict[str, object]]:
        """The sampling parameters of a request, for responses of exactly these lengths."""
        return [
            one | {"max_new_tokens": self._shortest + one["sampling_seed"] % self._span, "ignore_eos": True}
            for one in parameters
        ]


class FixedLengthClient(SGLangClient):
    """Miles' client, but for the lengths."""

    def __init__(self, url: str, lengths: Lengths) -> None:
        super().__init__(url)
        self._lengths = lengths

    async def generate(self, input_ids: list[list[int]], sampling_params: list[dict[str, object]]) -> list[dict]:
        return await super().generate(input_ids, self._lengths.fixed(sampling_params))


class RawSide:
    """Prepares the bodies of the requests beforehand; sends them, and counts nothing until all is over."""

    def __init__(self, config: RunConfig, tokenizer: Any, lengths: Lengths, url: str) -> None:
        self._config, self._lengths, self._url = config, lengths, url
        self._data = RolloutDataSource(config, tokenizer)
        self._end_ids = sorted(end_token_ids(config.hf_checkpoint, tokenizer))
        self.bodies: list[bytes] = []
        self.answers: list[bytes] = []

    def prepare(self) -> None:
        """The bodies of the next rollout."""
        sampling, self.bodies = Sampling.for_rollout(self._config), []
        for group in self._data.get_samples(self._config.rollout_batch_size):
            parameters = [sampling.parameters(sample) | {"stop_token_ids": self._end_ids} for sample in group]
            ids = [sample.tokens for sample in group]
            body = {"input_ids": ids, "sampling_params": self._lengths.fixed(parameters), "return_logprob": True}
            self.bodies.append(orjson.dumps(body))

    async def run(self) -> None:
        """Send them all, no more at once than Miles does."""
        slots = asyncio.Semaphore(self._config.sglang_server_concurrency // self._config.n_samples_per_prompt)
        headers = {"Content-Type": "application/json"}

        async def send(body: bytes) -> bytes:
            async with slots, session.post(self._url + "/generate", data=body, headers=headers) as response:
                response.raise_for_status()
                return await response.read()

        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session:
            self.answers = await asyncio.gather(*map(send, self.bodies))


class StandIn:
    """In an engine's place: a server that only waits."""

    def __init__(self, config: RunConfig, ms_per_token: float) -> None:
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        script = str(Path(__file__).with_name("stand_in_server.py"))
        command = [sys.executable, script, "--port", str(port), "--ms-per-token", str(ms_per_token)]
        log = Path(config.run_dir) / "logs" / "stand_in.log"
        self._server = ServerProcess(command, dict(os.environ), log, self._url + "/health")

    def start(self) -> str:
        """Its URL, once it answers."""
        self._server.start()
        self._server.wait_healthy(60)
        return self._url

    def check(self) -> None:
        """Raise ServerDied if it has ended."""
        self._server.check()

    def shutdown(self) -> None:
        """End it."""
        self._server.terminate()


class MilesSide:
    """A rollout as the RolloutManager makes it."""

    def __init__(self, config: RunConfig, tokenizer: Any, client: SGLangClient, engine: SGLangEngine | StandIn) -> None:
        async def check_engines() -> dict[SGLangClient, BaseException]:
            try:
                engine.check()
            except ServerDied as error:
                return {client: error}
            return {}

        pool = EnginePool(config, [client], config.sglang_server_concurrency, tokenizer, check_engines)
        self._collector = Collector(config, RolloutDataSource(config, tokenizer), pool, load_hooks(config, tokenizer))
        self._rollout_id = 0
        self.groups: list[list[Sample]] = []

    async def run(self) -> None:
        self.groups = (await self._collector.collect(self._rollout_id, None)).groups
        self._rollout_id += 1


async def timed(side: RawSide | MilesSide, client: SGLangClient) -> tuple[float, float]:
    """Seconds of one rollout, and CPU seconds of this process in it."""
    await client.flush_cache()
    gc.collect()
    start, cpu = time.perf_counter(), time.process_time()
    await side.run()
    return time.perf_counter() - start, time.process_time() - cpu


def check_equal(raw: RawSide, miles: MilesSide, asked: int) -> int:
    """Raise unless both sides had as many samples and tokens; returns the tokens."""
    counts = [reply["meta_info"]["completion_tokens"] for answer in raw.answers for reply in orjson.loads(answer)]
    samples = [sample for group in miles.groups for sample in group]
    ours = [sample.response_length for sample in sorted(samples, key=lambda sample: sample.index)]
    if counts != ours or len(counts) != asked or any(sample.reward is None for sample in samples):
        raise RuntimeError(
            f"asked for {asked} samples: raw has {len(counts)} with {sum(counts)} tokens, Miles {len(ours)} with "
            f"{sum(ours)}"
        )
    return sum(counts)


def parts_of(config: RunConfig, tokenizer: Any, raw: RawSide, miles: MilesSide) -> dict[str, float]:
    """CPU seconds of each part of Miles' work, alone, on one rollout."""
    bodies = [orjson.loads(body) for body in raw.bodies]
    responses = [sample.tokens[sample.prompt_length :] for group in miles.groups for sample in group]

    async def rewards() -> None:
        for group in miles.groups:
            await compute_rewards(config, group)

    works: dict[str, Callable[[], object]] = {
        "JSON of requests": lambda: [orjson.dumps(body) for body in bodies],
        "JSON of answers": lambda: [orjson.loads(answer) for answer in raw.answers],
        "tokens to text": lambda: [tokenizer.decode(ids, skip_special_tokens=False) for ids in responses],
        "reward": lambda: asyncio.run(rewards()),
    }
    seconds = {}
    for name, work in works.items():
        runs = []
        for _ in range(3):
            gc.collect()
            start = time.process_time()
            work()
            runs.append(time.process_time() - start)
        seconds[name] = min(runs)
    return seconds


def run_config(folder: Path, options: Any) -> RunConfig:
    """The run that the RolloutManager would see."""
    model = options.model
    if model is None:
        model = folder / "model"
        make_tiny_checkpoint(model)
    make_prompts("addition", options.groups * (options.repetitions + 1), folder / "prompts.jsonl", seed=0)
    flags = f"--device {options.device} --actor-num-gpus-per-node 1 --colocate --no-offload --num-rollout 1"
    flags += f" --rollout-batch-size {options.groups} --n-samples-per-prompt {SAMPLES_PER_PROMPT}"
    flags += f" --rollout-max-response-len {options.max_tokens} --sglang-server-concurrency {options.concurrency}"
    flags += " --apply-chat-template --custom-rm-path rollout.reward"
    if options.device == "cuda":
        flags += f" --bf16 {GPU_SERVER}"
    files = ["--hf-checkpoint", str(model), "--prompt-data", str(folder / "prompts.jsonl"), "--run-dir", str(folder)]
    return parse_args([*flags.split(), *files])


async def repeat(
    config: RunConfig, tokenizer: Any, engine: SGLangEngine | StandIn, url: str, lengths: Lengths, repetitions: int
) -> tuple[list[list[tuple[float, float]]], int, RawSide, MilesSide]:
    """(seconds, CPU seconds) of raw, Miles, raw in each repetition, without the first; tokens; the two sides."""
    async with FixedLengthClient(url, lengths) as client:
        raw, miles = RawSide(config, tokenizer, lengths, url), MilesSide(config, tokenizer, client, engine)
        runs, tokens = [], 0
        for repetition in range(repetitions + 1):
            raw.prepare()
            runs.append([await timed(side, client) for side in (raw, miles, raw)])
            tokens = check_equal(raw, miles, config.samples_per_rollout)
            print(f"repetition {repetition}: " + ", ".join(f"{wall:.2f} s" for wall, _ in runs[-1]), flush=True)
        return runs[1:], tokens, raw, miles


def table(runs: list[list[tuple[float, float]]], parts: dict[str, float]) -> list[Row]:
    """Medians and the middle half of the repetitions; the parts as shares of the raw seconds."""
    raw = [(first[0] + last[0]) / 2 for first, _, last in runs]
    base = statistics.median(raw)

    def row(name: str, unit: str, values: list[float], share: bool = True) -> Row:
        middle = statistics.median(values)
        low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [middle] * 3
        return {
            "what": name,
            "unit": unit,
            "median": middle,
            "25%": low,
            "75%": high,
            "% of raw": middle / base * 100 if share else None,
        }

    cpu_raw = statistics.median((first[1] + last[1]) / 2 for first, _, last in runs)
    cpu_ours = statistics.median(ours[1] for _, ours, _ in runs)
    rows = [
        row("raw SGLang", "s", raw),
        row("Miles", "s", [ours[0] for _, ours, _ in runs]),
        row("overhead", "%", [(ours[0] / mean - 1) * 100 for (_, ours, _), mean in zip(runs, raw, strict=True)], False),
        row("noise", "%", [(last[0] / first[0] - 1) * 100 for first, _, last in runs], False),
        row("CPU, raw", "s", [cpu_raw]),
        row("CPU, Miles", "s", [cpu_ours]),
    ]
    rows += [row("  " + name, "s", [seconds]) for name, seconds in parts.items()]
    rows.append(row("  other", "s", [cpu_ours - cpu_raw - sum(parts.values())]))
    return rows


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("--model", type=Path, help="Hugging Face checkpoint (default: a tiny random one)")
    cli.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the engine (default cpu)")
    cli.add_argument("--groups", type=int, help=f"prompts, {SAMPLES_PER_PROMPT} samples each (default 32, GPU 256)")
    cli.add_argument("--concurrency", type=int, help="samples in flight at most (default 128, GPU 512)")
    cli.add_argument("--min-tokens", type=int, help="of the shortest response (default 16, GPU 128)")
    cli.add_argument("--max-tokens", type=int, help="of the longest response (default 64, GPU 512)")
    cli.add_argument("--repetitions", type=int, default=9, help="after the first, which is left out (default 9)")
    cli.add_argument("--stand-in", type=float, metavar="MS", help="no engine: a server that waits MS a token")
    options = cli.parse_args()
    sizes = SIZES[options.device if options.stand_in is None else "cuda"]
    for name, size in zip(("groups", "concurrency", "min_tokens", "max_tokens"), sizes, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, size)
    with tempfile.TemporaryDirectory() as folder:
        config = run_config(Path(folder), options)
        tokenizer = AutoTokenizer.from_pretrained(config.hf_checkpoint)
        if options.stand_in is None:
            engine = SGLangEngine(config, 0, [0] if options.device == "cuda" else [])
        else:
            engine = StandIn(config, options.stand_in)
        try:
            url = engine.start()
            lengths = Lengths(options.min_tokens, options.max_tokens)
            collect_rarely()  # as the RolloutManager does
            runs, tokens, raw, miles = asyncio.run(repeat(config, tokenizer, engine, url, lengths, options.repetitions))
        finally:
            engine.shutdown()
        parts = parts_of(config, tokenizer, raw, miles)
    rows = table(runs, parts)
    notes = {
        "model": "tiny random Qwen3" if options.model is None else options.model.name,
        "engine on": options.device if options.stand_in is None else f"nothing: {options.stand_in:g} ms a token",
        "repetitions": options.repetitions,
        "groups": options.groups,
        "samples a group": SAMPLES_PER_PROMPT,
        "samples in flight": options.concurrency,
        "tokens a response": f"{options.min_tokens} to {options.max_tokens}",
        "response tokens": tokens,
        "raw tokens/s": tokens / rows[0]["median"],
    }
    report("A rollout with Miles and with raw SGLang calls", rows, notes, options.json)


if __name__ == "__main__":
    main()
