"""What SGLang's DeepSeek-V4 needs beside arguments: environment variables, and its ropes as they were trained.

SGLang 0.5.15 stretches the ropes of all layers by YaRN. The published model stretches those of layers with compressed
entries alone (its inference/model.py; sglang issue 25144): a layer of ratio 0 has the plain ones.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

ARCHITECTURE = "DeepseekV4ForCausalLM"


def _load_model(load: Callable[..., None], runner: Any, *args: object, **kwargs: object) -> None:
    """Around ModelRunner.load_model, which builds the layers."""
    if ARCHITECTURE not in (runner.model_config.hf_config.architectures or ()):
        load(runner, *args, **kwargs)
        return
    with plain_ropes():
        load(runner, *args, **kwargs)


@contextlib.contextmanager
def plain_ropes() -> Iterator[None]:
    """Within it layers of ratio 0 are built with angles that nothing stretches."""
    from sglang.srt.models.deepseek_v4 import MQALayer

    with mock.patch.object(MQALayer, "__init__", with_plain_ropes(MQALayer.__init__)):
        yield


def with_plain_ropes(build: Callable[..., None]) -> Callable[..., None]:
    """MQALayer.__init__, for which a layer of ratio 0 has angles that nothing stretches."""

    @functools.wraps(build)
    def build_layer(
        layer: Any,
        config: Any,
        layer_id: int,
        *args: object,
        compress_ratio_override: int | None = None,
        **kwargs: object,
    ) -> None:
        from sglang.srt.layers import deepseek_v4_rope

        ratio = config.compress_ratios[layer_id] if compress_ratio_override is None else compress_ratio_override
        angles = deepseek_v4_rope.precompute_freqs_cis
        if not ratio:
            angles = _without_stretch(angles)
        with mock.patch.object(deepseek_v4_rope, "precompute_freqs_cis", angles):
            build(layer, config, layer_id, *args, compress_ratio_override=compress_ratio_override, **kwargs)

    return build_layer


def _without_stretch(angles: Callable[..., Any]) -> Callable[..., Any]:
    def plain(**arguments: Any) -> Any:
        # SGLang's own word for a rope without YaRN.
        return angles(**arguments | {"original_seq_len": 0})

    return plain


def register() -> None:
    """Hook it into this process's server, before SGLang loads its plugins."""
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.load_model", _load_model, HookType.AROUND)
