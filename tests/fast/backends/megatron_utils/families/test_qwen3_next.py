"""What is special in Qwen3-Next and Qwen3.5: parts of whole models, and kernels."""

import pytest
from transformers import Qwen3_5Config, Qwen3NextConfig

from miles.backends.megatron_utils.families import family_for
from miles.hf.config import load_hf_config
from miles.hf.parallel import ParallelSizes
from tests.fast.backends.megatron_utils.families.data.qwen3_next import CASES, config_of


def test_what_the_whole_model_says_counts(tmp_path):
    whole = Qwen3_5Config(text_config=CASES["qwen3_5"].to_dict(), tie_word_embeddings=True)
    whole.architectures, whole.quantization_config = ["Qwen3_5ForConditionalGeneration"], {"quant_method": "fp8"}
    whole.save_pretrained(tmp_path)
    hf_config = load_hf_config(tmp_path)
    assert hf_config.tie_word_embeddings and hf_config.num_hidden_layers == 2
    with pytest.raises(
        ValueError, match="Qwen3_5ForConditionalGeneration is not supported: quantization_config.quant_method="
    ):
        family_for(hf_config)


def test_a_gpu_without_kernels_is_refused(monkeypatch):
    hf_config = config_of(Qwen3NextConfig)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("miles.backends.megatron_utils.parts.gated_delta_net.KERNELS_INSTALLED", False)
    with pytest.raises(ValueError, match="pip install flash-linear-attention"):
        family_for(hf_config).check_layout(hf_config, ParallelSizes())


def test_a_hopper_gpu_with_kernels_that_are_wrong_there_is_refused(monkeypatch):
    hf_config = config_of(Qwen3NextConfig)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("miles.backends.megatron_utils.parts.gated_delta_net.KERNELS_INSTALLED", True)
    for version, fits in {"3.3.1": True, "3.6.0": False, "3.7.1": True}.items():
        monkeypatch.setattr("triton.__version__", version)
        if fits:
            family_for(hf_config).check_layout(hf_config, ParallelSizes())
        else:
            with pytest.raises(ValueError, match="pip install tilelang"):
                family_for(hf_config).check_layout(hf_config, ParallelSizes())
