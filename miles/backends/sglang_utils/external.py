"""An SGLang server that somebody else runs (--rollout-external-engine-addrs): looked at, never started or ended."""

import importlib.metadata
import json
from pathlib import Path

from miles.config import RunConfig
from miles.config.sglang_args import has_draft
from miles.engines.client import SGLangClient, SGLangError
from miles.hf.quantization import quantization_in
from miles.hf.shape import read_config_json
from miles.utils.errors import UserError

# Keys of config.json that say nothing about the model.
NOT_THE_MODEL = {"transformers_version", "_name_or_path", "dtype", "torch_dtype"}
# Of these SGLang keeps copies that only servers started by Miles renew after an update: see `float32_copies`.
KEEP_COPIES = {"glm4_moe", "glm4_moe_lite"}


class ExternalEngine:
    """The Ray actor for one external engine, with the methods of `SGLangEngine`.

    Args:
        config: the run's configuration.
        address: host:port of its server.
    """

    def __init__(self, config: RunConfig, address: str) -> None:
        self._config = config
        self._client = SGLangClient(f"http://{address}")

    async def start(self) -> str:
        """Compare the server with the configuration, and return its URL.

        Raises:
            ValueError: it does not answer, or differs; the message names each difference.
        """
        url = self._client.url
        try:
            info, model = await self._client.server_info(), await self._client.model_info()
        except SGLangError as error:
            raise UserError(f"the external engine {url} (--rollout-external-engine-addrs): {error}") from error
        found = [*_server_problems(self._config, info), *_model_problems(self._config.hf_checkpoint, model)]
        if self._config.needs_trainer:
            found += _stale_copies(model)
        if found:
            raise UserError(f"the external engine {url} (--rollout-external-engine-addrs) {'; it '.join(found)}")
        return url

    async def check(self) -> None:
        """Raise SGLangError if nothing listens there any more. One that answers late, or with an error, is there."""
        await self._client.require_reachable()

    async def shutdown(self) -> None:
        """Let go of the server, which runs on."""
        await self._client.close()


def _server_problems(config: RunConfig, info: dict) -> list[str]:
    """What is wrong with a server, as ends of a sentence that begins with its name."""
    problems = []
    version = importlib.metadata.version("sglang")
    if info["version"] != version:
        problems.append(f"runs SGLang {info['version']}, here is {version}: install the same on both sides")
    if info["tp_size"] != config.engine_tp_size:
        problems.append(
            f"has tp_size {info['tp_size']}, not --rollout-num-gpus-per-engine {config.engine_tp_size}: change either"
        )
    if info["pp_size"] > 1:
        problems.append(f"has pp_size {info['pp_size']}, which weights cannot be sent to: start it without")
    if info["dp_size"] > 1 and not info["enable_dp_attention"]:
        problems.append(
            f"has dp_size {info['dp_size']} without DP attention, which weights cannot be sent to: start it with "
            "--enable-dp-attention, or as several engines"
        )
    most = info["max_req_input_len"] - 1
    longest = max(config.rollout_max_context_len or 0, config.eval_max_context_len or 0)
    if longest > most:
        problems.append(
            f"goes on with at most {most} tokens, and prompt and response may have {longest}: start it with a larger "
            f"--context-length, or give --rollout-max-context-len {most} and no larger --eval-max-context-len"
        )
    dtype = "bfloat16" if config.bf16 else "float32"
    if info["dtype"] != dtype:
        problems.append(f"has dtype {info['dtype']}, the trainer has {dtype}: start it with --dtype {dtype}")
    if config.needs_trainer and info["quantization"] is not None:
        problems.append(f"has quantization {info['quantization']}, which weights cannot be sent to: start it without")
    if config.needs_trainer and quantization_in(config.hf_checkpoint) is not None:
        override = json.loads(info["json_model_override_args"] or "{}")
        if "quantization_config" not in override or override["quantization_config"] is not None:
            problems.append(
                "has the quantised weights of its checkpoint, which weights cannot be sent to: start it with "
                "--load-format dummy --quantization unquant "
                "--json-model-override-args '{\"quantization_config\": null}'"
            )
    if config.needs_trainer and has_draft(info["speculative_algorithm"]):
        name = info["speculative_algorithm"]
        problems.append(f"has speculative_algorithm {name}, whose draft gets no new weights: start it without")
    return problems


def _model_problems(checkpoint: str, model: dict) -> list[str]:
    """How the model of a server differs from `checkpoint`; its folder may be unreadable here, on another machine."""
    ours = read_config_json(checkpoint)
    theirs = {"architectures": model["architectures"], "model_type": model["model_type"]}
    if (Path(model["model_path"]) / "config.json").is_file():
        theirs = read_config_json(model["model_path"])
    else:
        ours = {name: ours.get(name) for name in theirs}
    names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if names := [name for name in names if name not in NOT_THE_MODEL]:
        pairs = ", ".join(f"{name} {theirs.get(name)} instead of {ours.get(name)}" for name in names)
        return [f"serves {model['model_path']}, whose config.json differs from --hf-checkpoint {checkpoint}: {pairs}"]
    return []


def _stale_copies(model: dict) -> list[str]:
    """Why an update would not reach all that a server's model computes with."""
    kind = model["model_type"]
    if kind not in KEEP_COPIES:
        return []
    return [
        f"serves a {kind} model, whose routers SGLang computes with copies of their weights that it never renews after "
        "an update, except in engines that Miles starts: leave --rollout-external-engine-addrs out"
    ]
