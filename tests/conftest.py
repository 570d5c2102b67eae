"""Fixtures that start something expensive, once in a test session."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles.backends.sglang_utils.engine import SGLangEngine
from miles.config import RunConfig
from miles.utils.arguments import parse_args


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    """A Qwen3 of two layers with random weights in float32, and a byte-level tokenizer."""
    from miles.tools.make_tiny_checkpoint import make_tiny_checkpoint

    folder = tmp_path_factory.mktemp("checkpoint") / "tiny-qwen3"
    make_tiny_checkpoint(
        folder,
        hidden_size=64,
        num_layers=2,
        head_dim=16,
        intermediate_size=128,
        init_std=0.1,
        max_position_embeddings=512,
    )
    return folder


@pytest.fixture(scope="session")
def prompt_file(tmp_path_factory) -> Path:
    """Eight prompts of one to eight letters with a label."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"input": "abcdefgh"[: i + 1], "label": str(i)} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def engine_flags(tiny_checkpoint, prompt_file) -> list[str]:
    """Flags of a run with one CPU engine; add more to a copy."""
    return [
        *("--device", "cpu", "--hf-checkpoint", str(tiny_checkpoint), "--prompt-data", str(prompt_file)),
        *("--label-key", "label", "--rm-type", "exact", "--num-rollout", "1", "--rollout-batch-size", "4"),
        *("--n-samples-per-prompt", "4", "--rollout-max-response-len", "8", "--rollout-max-context-len", "64"),
        *("--colocate", "--no-offload-train", "--no-offload-rollout", "--actor-num-gpus-per-node", "1"),
        *("--rollout-engine-start-timeout", "300"),
    ]


@pytest.fixture(scope="session")
def engine_config(engine_flags, tmp_path_factory) -> RunConfig:
    """The configuration of `engine_flags`."""
    return parse_args([*engine_flags, "--run-dir", str(tmp_path_factory.mktemp("run"))])


@pytest.fixture(scope="session")
def engine_server(engine_config) -> Iterator[str]:
    """URL of a real SGLang server on the tiny checkpoint. All tests share it: leave it as it was."""
    engine = SGLangEngine(engine_config, 0, [])
    url = engine.start()
    yield url
    engine.shutdown()
