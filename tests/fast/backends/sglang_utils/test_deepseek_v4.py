"""SGLang's DeepSeek-V4: the ropes that the plug-in builds, and the environment of its server."""

import json
import os
import subprocess
import sys
from importlib.metadata import files
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from sglang.srt.layers import deepseek_v4_rope
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Config, DeepseekV4RotaryEmbedding

from miles.backends.sglang_utils import deepseek_v4
from miles.backends.sglang_utils.arguments import server_environment
from miles.hf.deepseek_v4_hub import hub_config
from miles.utils.arguments import parse_args

LENGTH, ROPE, RATIOS = 256, 64, [0, 4, 128]
BASE, COMPRESSED_BASE = 10000.0, 160000.0
YARN = {"original_max_position_embeddings": 65536, "factor": 16.0, "beta_fast": 32, "beta_slow": 1}


class Layer:
    """Asks for its angles as sglang.srt.models.deepseek_v4.MQALayer does."""

    def __init__(self, config, layer_id, quant_config=None, prefix="", compress_ratio_override=None):
        ratio = config.compress_ratios[layer_id] if compress_ratio_override is None else compress_ratio_override
        from sglang.srt.layers.deepseek_v4_rope import precompute_freqs_cis

        self.freqs_cis = precompute_freqs_cis(
            dim=ROPE,
            seqlen=LENGTH,
            original_seq_len=YARN["original_max_position_embeddings"],
            base=COMPRESSED_BASE if ratio else BASE,
            factor=YARN["factor"],
            beta_fast=YARN["beta_fast"],
            beta_slow=YARN["beta_slow"],
        )


ROPES = dict(
    head_dim=512,
    partial_rotary_factor=ROPE / 512,
    max_position_embeddings=4096,
    rope_theta=BASE,
    compress_rope_theta=COMPRESSED_BASE,
    rope_parameters={"rope_type": "yarn", **YARN},
)
SIZES = dict(
    vocab_size=64,
    hidden_size=64,
    num_hidden_layers=len(RATIOS),
    num_attention_heads=8,
    moe_intermediate_size=32,
    num_experts_per_tok=2,
    n_routed_experts=4,
    q_lora_rank=16,
    o_groups=2,
    o_lora_rank=16,
)


def transformers_angles(ratio: int) -> torch.Tensor:
    """e^(i angle) of a layer's rope, [positions, pairs]."""
    positions = torch.arange(LENGTH)[None]
    ropes = DeepseekV4RotaryEmbedding(DeepseekV4Config(**ROPES))
    cos, sin = ropes(torch.zeros(1, LENGTH, 1), positions, layer_type="compress" if ratio else "main")
    return torch.complex(cos[0], sin[0])


@pytest.mark.parametrize("layer_id", range(len(RATIOS)))
def test_a_layer_has_the_angles_of_transformers(layer_id):
    with mock.patch.object(Layer, "__init__", deepseek_v4.with_plain_ropes(Layer.__init__)):
        layer = Layer(config=SimpleNamespace(compress_ratios=RATIOS), layer_id=layer_id, prefix="model")
    torch.testing.assert_close(layer.freqs_cis, transformers_angles(RATIOS[layer_id]), atol=2e-5, rtol=0)
    assert deepseek_v4_rope.precompute_freqs_cis.__name__ == "precompute_freqs_cis"  # the function is back


@pytest.mark.real
@pytest.mark.slow
def test_sglangs_own_layers(tmp_path):
    config = DeepseekV4Config(**ROPES, compress_ratios=RATIOS, num_hash_layers=1, num_nextn_predict_layers=0, **SIZES)
    (tmp_path / "config.json").write_text(json.dumps(hub_config(config)))
    script = Path(__file__).with_name("deepseek_v4_layers.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "SGLANG_USE_CPU_ENGINE": "1"}
    environment["SGLANG_OPT_FP8_WO_A_GEMM"] = "0"
    subprocess.run([sys.executable, script, tmp_path, tmp_path / "result"], env=environment, check=True)
    built = torch.load(tmp_path / "result")
    for layer, ratio in enumerate(RATIOS):
        expected = transformers_angles(ratio)
        torch.testing.assert_close(built["Miles"][layer][:LENGTH], expected, atol=2e-5, rtol=0)
        # What is to be cured.
        assert torch.allclose(built["SGLang"][layer][:LENGTH], expected, atol=2e-5) == bool(ratio)


def test_a_next_token_layer_says_its_ratio_itself():
    with mock.patch.object(Layer, "__init__", deepseek_v4.with_plain_ropes(Layer.__init__)):
        layer = Layer(SimpleNamespace(compress_ratios=[4]), 0, compress_ratio_override=0)
    torch.testing.assert_close(layer.freqs_cis, transformers_angles(0), atol=2e-5, rtol=0)


def test_what_is_to_be_cured():
    """Fails once SGLang's layers of ratio 0 are right by themselves: then the plug-in can go."""
    stock = Layer(SimpleNamespace(compress_ratios=RATIOS), 0)
    assert (stock.freqs_cis - transformers_angles(0)).abs().max() > 0.02
    (path,) = (path for path in files("sglang") if str(path) == "sglang/srt/models/deepseek_v4.py")
    text = path.read_text()
    assert "        from sglang.srt.layers.deepseek_v4_rope import precompute_freqs_cis\n" in text
    assert 'original_seq_len = rope_scaling["original_max_position_embeddings"]' in text
    assert "compress_ratio_override: Optional[int] = None," in text


def test_only_deepseek_v4_is_touched():
    built = []

    def runner(architecture):
        return SimpleNamespace(model_config=SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture])))

    deepseek_v4._load_model(built.append, runner("LlamaForCausalLM"))
    assert len(built) == 1


def test_environment(engine_flags, tmp_path, monkeypatch):
    config = parse_args(engine_flags)

    def environment(device="cpu", **changes):
        fields = {"model_type": "deepseek_v4", **changes}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        of = config.model_copy(update={"hf_checkpoint": str(tmp_path), "device": device})
        return server_environment(of, engine_rank=0, gpu_ids=[0] if device == "cuda" else [], port=5)

    plain = environment()
    assert plain["SGLANG_OPT_FP8_WO_A_GEMM"] == plain["SGLANG_DSV4_FP4_EXPERTS"] == "0"
    assert plain["SGLANG_DSV4_MHC_PREWARM"] == "0" and "SGLANG_DSV4_MHC_PREWARM" not in environment("cuda")
    assert "SGLANG_DSV4_FP4_EXPERTS" not in environment(quantization_config={"quant_method": "fp8"})
    assert not [name for name in environment(model_type="llama") if "DSV4" in name or "WO_A" in name]
    monkeypatch.setenv("SGLANG_OPT_FP8_WO_A_GEMM", "1")
    assert environment()["SGLANG_OPT_FP8_WO_A_GEMM"] == "1"
