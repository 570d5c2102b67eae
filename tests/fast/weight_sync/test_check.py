from datetime import timedelta

import pytest
import torch

from miles.hf.fp8 import quantise
from miles.weight_sync.bucket import views
from miles.weight_sync.check import SentHashes, compare, tensor_hash
from miles.weight_sync.format import Fp8Format
from miles.weight_sync.plan import plan_buckets
from miles.weight_sync.source import FullTensor, SourcePart
from miles.weight_sync.transport import TransportSetup


def test_a_tensor_that_no_update_restores_is_named_unless_nothing_reads_it():
    before = [{"model.norm.weight": "1", "model.normalizer": "2"}]
    compare("URL", before, [before[0] | {"model.normalizer": "3"}], {"model.norm.weight": "1"})
    with pytest.raises(RuntimeError, match="1 tensors of URL were not overwritten by an update: model.norm.weight"):
        compare("URL", before, [before[0] | {"model.norm.weight": "3"}], {"model.norm.weight": "1"})


@pytest.mark.parametrize(("columns", "is_compared"), [(256, True), (192, False)])
def test_fp8_is_hashed_as_sglang_hashes_it(columns, is_compared):
    """By the values of codes and scales; of columns that are no whole blocks SGLang gets other values."""
    from sglang.srt.utils.weight_checker_comparator import Fp8BlockComparable

    torch.manual_seed(0)
    weight, norm = torch.randn(200, columns), torch.randn(8)
    tensors = (FullTensor("w", (200, columns), torch.float32), FullTensor("norm", (8,), torch.float32))
    (bucket,) = plan_buckets([SourcePart("both", tensors)], Fp8Format({"w"}), 10**6)
    codes, scales = quantise(weight)
    flat = torch.empty(bucket.nbytes, dtype=torch.uint8)
    for name, value in {"w": codes, "w_scale_inv": scales, "norm": norm}.items():
        views(bucket, flat)[name].copy_(value)
    sent = SentHashes(
        TransportSetup(0, [0], torch.device("cpu"), "127.0.0.1", timedelta(minutes=1), 10**6, "checkpoint", None)
    )
    sent.prepare(bucket, flat)
    theirs = tensor_hash(Fp8BlockComparable(codes, scales).dequantize()) if is_compared else None
    assert sent.hashes == {"norm": tensor_hash(norm)} | ({"w": theirs} if is_compared else {})
