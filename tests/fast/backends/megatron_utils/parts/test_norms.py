"""Norms against transformers', in half precision too."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from miles.backends.megatron_utils.parts.norms import PlusOneNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plus_one_norm_is_gemmas(dtype):
    torch.manual_seed(0)
    config = SimpleNamespace(params_dtype=dtype, sequence_parallel=True)
    own, reference = PlusOneNorm(config, 48, eps=1e-5), Gemma3RMSNorm(48, eps=1e-5).to(dtype)
    assert own.weight.sequence_parallel and torch.equal(own.weight, reference.weight)
    with torch.no_grad():
        own.weight.copy_(reference.weight.normal_(0, 0.1))
    x = torch.randn(7, 48, dtype=dtype) * 0.01
    # One rounding of the result may fall on the other side.
    torch.testing.assert_close(own(x), reference(x), rtol=0.0 if dtype == torch.float32 else 2**-7, atol=3e-7)
