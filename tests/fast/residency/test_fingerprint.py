import pytest
import torch

from miles.residency import fingerprint as module
from miles.residency.fingerprint import fingerprint

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def reference(tensor: torch.Tensor) -> int:
    """The same number in plain Python integers, less what dtype and shape add."""
    data = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    data += bytes(-len(data) % 8)
    total = 0
    for place in range(len(data) // 8):
        word = int.from_bytes(data[8 * place : 8 * place + 8], "little")
        word = (word + place * module.POSITION) & module.MASK
        word = (word ^ word >> 32) * module.MULTIPLIER & module.MASK
        total += word ^ word >> 29
    return total & module.MASK


def part_of_contents(tensor: torch.Tensor) -> int:
    empty = torch.zeros_like(tensor)
    return (fingerprint(tensor) - fingerprint(empty) + reference(empty)) & module.MASK


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 7, 8, 1001])
def test_every_dtype_and_size_as_the_definition_says(dtype, size, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 64)  # many chunks, the last one not full
    torch.manual_seed(size)
    tensor = torch.randint(0, 2, (size * dtype.itemsize,), dtype=torch.uint8)
    if dtype != torch.bool:
        tensor = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8)
    tensor = tensor.view(dtype)
    assert part_of_contents(tensor) == reference(tensor)


def test_chunks_don_t_change_it(monkeypatch):
    tensor = torch.randn(10_001)
    before = fingerprint(tensor)
    monkeypatch.setattr(module, "CHUNK", 100)
    assert fingerprint(tensor) == before


def test_each_changed_bit_is_seen():
    tensor = torch.randn(9).bfloat16()
    seen = {fingerprint(tensor)}
    for byte in range(18):
        for bit in range(8):
            changed = tensor.clone()
            changed.view(torch.uint8)[byte] ^= 1 << bit
            seen.add(fingerprint(changed))
    assert len(seen) == 1 + 18 * 8


def test_signs_and_nan_payloads_are_seen():
    quiet, loud = (torch.tensor([bits]).view(torch.float64) for bits in (0x7FF8000000000001, 0x7FF8000000000002))
    assert fingerprint(quiet) == fingerprint(quiet.clone()) != fingerprint(loud)
    assert fingerprint(torch.tensor(0.0)) != fingerprint(torch.tensor(-0.0))


@pytest.mark.parametrize("stride", [1, 2, 8, 4096])
def test_swaps_are_seen_even_of_words_that_differ_in_their_sign_only(stride):
    words = torch.zeros(2 * stride, dtype=torch.int64)
    words[0] = -(2**63)
    assert fingerprint(words) != fingerprint(words.roll(stride))


def test_dtype_and_shape_count():
    tensor = torch.arange(24, dtype=torch.int32)
    others = [tensor.view(torch.float32), tensor.view(4, 6), tensor.view(6, 4), torch.cat([tensor, tensor[:1] * 0])]
    assert len({fingerprint(other) for other in [tensor, *others]}) == 5
    assert fingerprint(torch.zeros(0)) != fingerprint(torch.zeros(0, 3)) != fingerprint(torch.zeros(1))


def test_views_count_by_their_contents():
    base = torch.arange(100, dtype=torch.uint8)
    assert fingerprint(base[3:20]) == fingerprint(base[3:20].clone())
    matrix = torch.randn(5, 7)
    assert fingerprint(matrix.t()) == fingerprint(matrix.t().contiguous()) != fingerprint(matrix)
    parameter = torch.nn.Parameter(matrix)
    assert fingerprint(parameter) == fingerprint(matrix)
