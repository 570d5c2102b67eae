"""How far SGLang's log-probabilities of a DeepSeek-V4 are from those of transformers in float32, on one GPU.

    python benchmarks/deepseek_v4_gap.py --model FOLDER [--json PATH]

FOLDER is a random model that SGLang's kernels take (docs/recipes/deepseek-v4.md).
The engine is SGLang as it comes, and as Miles starts it, with plain ropes in layers without compression. The reference
is the same weights in transformers, with keys as they are, or rounded as the engine's cache rounds them: the 448
channels without rope in FP8, a power-of-two scale for each 64. Tokens are random prompts and samples.
"""

import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import requests
import torch
from common import ROOT, Row, parser, report

sys.path.insert(0, str(ROOT))

LENGTHS, SAMPLED = (40, 200, 700), 64
PROMPTS_OF_A_LENGTH = 4
ENTRIES = {"SGLang": "sglang.launch_server", "Miles": "miles.backends.sglang_utils.gpu_server"}
FP8_CHANNELS, FP8_BLOCK, FP8_LARGEST = 448, 64, 448.0
START_SECONDS = ANSWER_SECONDS = 500


def answers(entry: str, model: Path, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """For each prompt its tokens with the sampled ones, and the engine's log-probability of each but the first."""
    from miles.backends.sglang_utils.server_process import ServerProcess
    from miles.utils.network import free_ports

    port = free_ports(1, "127.0.0.1")[0]
    url = f"http://127.0.0.1:{port}"
    options = {"--model-path": model, "--port": port, "--dtype": "bfloat16", "--sampling-backend": "pytorch"}
    options |= {"--log-level": "warning", "--mem-fraction-static": 0.3, "--max-running-requests": 16}
    switches = ["--disable-cuda-graph", "--skip-server-warmup", "--skip-tokenizer-init", "--disable-radix-cache"]
    command = [sys.executable, "-m", entry, *(str(part) for option in options.items() for part in option), *switches]
    settings = {"SGLANG_OPT_FP8_WO_A_GEMM": "0", "SGLANG_DSV4_FP4_EXPERTS": "0"}
    settings["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        server = ServerProcess(command, os.environ | settings, log, f"{url}/health")
        try:
            server.start()
            server.wait_healthy(START_SECONDS)
            return [_answer(url, prompt) for prompt in prompts]
        finally:
            server.terminate()


def _answer(url: str, prompt: list[int]) -> tuple[list[int], list[float]]:
    sampling = {"max_new_tokens": SAMPLED, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    reply = requests.post(f"{url}/generate", json=body, timeout=ANSWER_SECONDS)
    reply.raise_for_status()
    meta = reply.json()["meta_info"]
    pairs = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
    return [prompt[0], *(pair[1] for pair in pairs)], [pair[0] for pair in pairs]


def reference(model: Path, fp8_keys: bool) -> Any:
    """A function: tokens -> float32 log-probabilities of all but the first."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    net = AutoModelForCausalLM.from_pretrained(model, config=config, dtype=torch.float32, attn_implementation="eager")
    net = net.cuda().eval()
    if fp8_keys:
        width = config.head_dim
        for name, module in net.named_modules():
            if name.endswith("kv_norm") and module.weight.shape[0] == width:
                module.register_forward_hook(lambda _module, _inputs, keys: round_keys(keys))

    def log_probs(tokens: list[int]) -> torch.Tensor:
        ids = torch.tensor([tokens], device="cuda")
        with torch.no_grad():
            scores = net(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return scores.gather(1, ids[0, 1:, None])[:, 0].cpu()

    return log_probs


def round_keys(keys: torch.Tensor) -> torch.Tensor:
    """Keys as SGLang's cache holds them: the first 448 channels in FP8 blocks of 64, the rest in bf16; [..., 512]."""
    blocks = keys[..., :FP8_CHANNELS].unflatten(-1, (-1, FP8_BLOCK))
    scale = (blocks.abs().amax(-1, keepdim=True).clamp_min(1e-4) / FP8_LARGEST).log2().ceil().exp2()
    rounded = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    return torch.cat([rounded.flatten(-2), keys[..., FP8_CHANNELS:].bfloat16().float()], -1)


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("--model", type=Path, required=True, help="folder of the random model")
    options = cli.parse_args()
    draw = random.Random(0)
    prompts = [[draw.randrange(256) for _ in range(length)] for length in LENGTHS for _ in range(PROMPTS_OF_A_LENGTH)]
    said = {engine: answers(entry, options.model, prompts) for engine, entry in ENTRIES.items()}
    rows: list[Row] = []
    for fp8_keys in (False, True):
        log_probs = reference(options.model, fp8_keys)
        for engine, replies in said.items():
            by_length: dict[int, list[float]] = {}
            for prompt, (tokens, mine) in zip(prompts, replies, strict=True):
                gaps = (torch.tensor(mine) - log_probs(tokens)).abs()
                by_length.setdefault(len(prompt), []).extend(gaps.tolist())
            for length, gaps in by_length.items():
                row: Row = {"engine": engine, "keys of the reference": "FP8" if fp8_keys else "float32"}
                row |= {"prompt": length, "mean": statistics.mean(gaps), "largest": max(gaps), "tokens": len(gaps)}
                rows.append(row)
    report("Log-probabilities: engine against transformers in float32", rows, {"sampled": SAMPLED}, options.json)


if __name__ == "__main__":
    main()
