"""Seconds a step of the real loop on a CPU, by phase, against limits and a peer measured in the same run.

    python benchmarks/cpu_loop.py [--steps 6] [--json PATH]

train.py runs scripts/demo/grpo.yaml on a random checkpoint of the demo's size, without its evaluations; the first step,
which warms everything up, is left out, and the median of the others is shown. The limits:

- generate: the same requests, sent to a server with the same arguments by a bare HTTP client that reads nothing;
- train: the same samples in plain PyTorch on one thread: transformers' Qwen3 in padded batches, old log-probabilities,
  clipped loss, backward pass, clipping, AdamW.

The peer is TRL's GRPOTrainer with transformers' generation, alone on the machine, with as many threads as it has cores:
the same model, prompts, reward, group size, lengths, batch, optimizer and clipping (trl_loop.py). It keeps one model in
one process; Miles moves weights and samples between two, which is what lets them be on many machines.
"""

import asyncio
import importlib.metadata
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import aiohttp
import torch
from common import ROOT, Row, parser, report
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_peer import run_miles, run_trl, write_config

from miles.backends.sglang_utils.arguments import (
    HOST,
    PORTS_OF_A_SERVER,
    command_line,
    server_arguments,
    server_environment,
)
from miles.backends.sglang_utils.server_process import ServerProcess
from miles.config import RunConfig
from miles.rollout.answers import end_token_ids
from miles.rollout.generate import Sampling
from miles.rollout.prompts.data_source import RolloutDataSource
from miles.utils.arguments import parse_args
from miles.utils.network import free_port_block
from miles.utils.types import Sample


def request_bodies(config: RunConfig, groups: list[list[Sample]], end_ids: list[int]) -> list[bytes]:
    """One request a group, as the loop sends it."""
    sampling, bodies = Sampling.for_rollout(config), []
    for group in groups:
        parameters = [sampling.parameters(sample) | {"stop_token_ids": end_ids} for sample in group]
        ids = [sample.tokens for sample in group]
        body = {"input_ids": ids, "sampling_params": parameters, "return_logprob": True}
        bodies.append(json.dumps(body).encode())
    return bodies


async def send_all(url: str, bodies: list[bytes]) -> tuple[float, list[bytes]]:
    """Seconds until every request, all sent at once, is answered; and the answers."""

    async def send(body: bytes) -> bytes:
        async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
            response.raise_for_status()
            return await response.read()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False) as session:
        start = time.perf_counter()
        answers = await asyncio.gather(*map(send, bodies))
        return time.perf_counter() - start, answers


def raw_generation(config: RunConfig, rollouts: list[list[list[Sample]]]) -> tuple[list[float], list[list[list[int]]]]:
    """Seconds of each rollout on a bare server, and the ids of each of its responses; the first warms the server up."""
    tokenizer = AutoTokenizer.from_pretrained(config.hf_checkpoint)
    end_ids = sorted(end_token_ids(config.hf_checkpoint, tokenizer))
    port = free_port_block(PORTS_OF_A_SERVER)
    server = ServerProcess(
        command_line(server_arguments(config, engine_rank=0, port=port)),
        server_environment(config, engine_rank=0, gpu_ids=[], port=port),
        Path(config.run_dir) / "logs" / "raw.log",
        f"http://{HOST}:{port}/health",
    )
    seconds, responses = [], []
    try:
        server.start()
        server.wait_healthy(config.rollout_engine_start_timeout)
        for groups in rollouts:
            taken, answers = asyncio.run(
                send_all(f"http://{HOST}:{port}/generate", request_bodies(config, groups, end_ids))
            )
            seconds.append(taken)
            responses.append([reply["output_ids"] for answer in answers for reply in json.loads(answer)])
    finally:
        server.terminate()
    return seconds[1:], responses[1:]


class PlainTrainer:
    """GRPO's step in plain PyTorch, without a framework: what the trainer's time is compared with."""

    def __init__(self, config: RunConfig):
        self.config = config
        self.model = AutoModelForCausalLM.from_pretrained(config.hf_checkpoint, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, betas=(config.adam_beta1, config.adam_beta2), weight_decay=0.0
        )

    def step(self, prompts: list[list[int]], responses: list[list[int]]) -> tuple[float, float]:
        """Train on one rollout; seconds of the old log-probabilities and of the optimizer steps."""
        size, rows = self.config.global_batch_size, len(prompts)
        batches = [_padded(prompts[i : i + size], responses[i : i + size]) for i in range(0, rows, size)]
        start = time.perf_counter()
        with torch.no_grad():
            old = [self._log_probs(*batch) for batch in batches]
        middle = time.perf_counter()
        for batch, old_BT in zip(batches, old, strict=True):
            self.optimizer.zero_grad()
            log_probs_BT, mask_BT = self._log_probs(*batch), batch[2]
            advantage_B1 = torch.randn(len(log_probs_BT), 1)
            ratio_BT = (log_probs_BT - old_BT).exp()
            clipped_BT = ratio_BT.clamp(1 - self.config.eps_clip, 1 + self.config.eps_clip_high)
            loss_BT = -torch.minimum(ratio_BT * advantage_B1, clipped_BT * advantage_B1)
            ((loss_BT * mask_BT).sum() / mask_BT.sum()).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_grad)
            self.optimizer.step()
        return middle - start, time.perf_counter() - middle

    def _log_probs(self, ids_BT: torch.Tensor, attention_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        logits_BTV = self.model(input_ids=ids_BT, attention_mask=attention_BT).logits[:, :-1]
        all_BTV = logits_BTV.log_softmax(dim=-1)
        return all_BTV.gather(-1, ids_BT[:, 1:, None])[..., 0] * mask_BT


def _padded(prompts: list[list[int]], responses: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids and attention mask, padded on the right, and the mask of the predicted response tokens (one column less)."""
    length = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    ids_BT, attention_BT, mask_BT = (torch.zeros(len(prompts), length, dtype=torch.long) for _ in range(3))
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        total = len(prompt) + len(response)
        ids_BT[row, :total] = torch.tensor(prompt + response)
        attention_BT[row, :total] = 1
        mask_BT[row, len(prompt) : total] = 1
    return ids_BT, attention_BT, mask_BT[:, 1:].float()


def table(
    steps: list[dict[str, float]], raw: list[float], plain: list[tuple[float, float]], trl: list[dict[str, float]]
) -> list[Row]:
    """Medians over the steps, with their limits and TRL's."""

    def median(name: str) -> float:
        return statistics.median(step[name] for step in steps)

    def peer(*parts: str) -> float:
        return statistics.median(sum(rollout[part] for part in parts) for rollout in trl)

    log_probs, actor_train = (statistics.median(column) for column in zip(*plain, strict=True))
    total, generate, train = median("perf/step_time"), median("perf/rollout_time"), median("perf/train_time")
    sync = median("perf/update_weights_time")
    phases = [
        ("generate", generate, statistics.median(raw), "raw SGLang", peer("generate")),
        ("train", train, log_probs + actor_train, "plain PyTorch", peer("score", "train")),
        ("  log_probs", median("perf/log_probs_time"), log_probs, "plain PyTorch", peer("score")),
        ("  actor_train", median("perf/actor_train_time"), actor_train, "plain PyTorch", peer("train")),
        ("sync", sync, None, "-", None),
        ("other", total - generate - train - sync, None, "-", None),
        ("step", total, None, "-", peer("step")),
    ]
    return [
        {
            "phase": name,
            "seconds": seconds,
            "share": seconds / total,
            "limit": limit,
            "times the limit": None if limit is None else seconds / limit,
            "limit by": source,
            "TRL": theirs,
            "times TRL": None if theirs is None else seconds / theirs,
        }
        for name, seconds, limit, source, theirs in phases
    ]


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--steps", type=int, default=6, help="steps of the loop; the first is left out (default 6)")
    options = command.parse_args()
    if options.steps < 2:
        command.error(f"--steps {options.steps}: the first step is left out, so at least 2 are needed")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        demo = ROOT / "scripts/demo/grpo.yaml"
        config_file = write_config(demo, Path(folder), None, "reverse", {"num_rollout": options.steps})
        config = parse_args(["--config", str(config_file)])
        steps = run_miles(config_file, config.run_dir)[1:]
        trl = run_trl(config_file, options.steps, {}, len(os.sched_getaffinity(0)))[1:]
        data = RolloutDataSource(config, AutoTokenizer.from_pretrained(config.hf_checkpoint))
        rollouts = [data.get_samples(config.rollout_batch_size) for _ in range(options.steps)]
        raw, responses = raw_generation(config, rollouts)
        trainer = PlainTrainer(config)
        prompts = [[sample.tokens for group in groups for sample in group] for groups in rollouts[1:]]
        trainer.step(prompts[0], responses[0])  # warms up
        plain = [trainer.step(*rollout) for rollout in zip(prompts, responses, strict=True)]
    new_tokens = statistics.mean(sum(map(len, rollout)) for rollout in responses)
    loop_tokens = statistics.mean(step["rollout/response_len/mean"] * config.samples_per_rollout for step in steps)
    rows = table(steps, raw, plain, trl)
    notes = {
        "steps": len(steps),
        "samples a step": config.samples_per_rollout,
        "samples/s": config.samples_per_rollout / rows[-1]["seconds"],
        "TRL's samples/s": config.samples_per_rollout / rows[-1]["TRL"],
        "trl": importlib.metadata.version("trl"),
        "optimizer steps a step": config.steps_per_rollout,
        "response tokens a step": round(loop_tokens),
        "the same, limits": round(new_tokens),
        "bytes of weights a sync": round(steps[0]["perf/update_weights_bytes"]),
    }
    report("Miles' loop on a CPU: seconds a step", rows, notes, options.json)


if __name__ == "__main__":
    main()
