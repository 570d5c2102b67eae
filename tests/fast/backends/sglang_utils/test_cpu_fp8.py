"""FP8 layers of an engine on a CPU; tests/fast/weight_sync/test_real_engine.py has a whole one."""

from types import SimpleNamespace

import torch

from miles.hf.fp8 import quantise
from tests.fast.quantised import fp8_blocks


def test_a_layer_computes_with_the_values_of_its_codes():
    from miles.backends.sglang_utils.cpu_fp8 import _apply

    torch.manual_seed(0)
    weight, x, bias = torch.randn(200, 256), torch.randn(3, 256), torch.randn(200)
    codes, scales = quantise(weight)
    method = SimpleNamespace(quant_config=SimpleNamespace(weight_block_size=[128, 128]))
    layer = SimpleNamespace(weight=torch.nn.Parameter(codes, False), weight_scale_inv=torch.nn.Parameter(scales, False))
    assert torch.equal(_apply(method, layer, x, bias), torch.nn.functional.linear(x, fp8_blocks(weight)[2], bias))
