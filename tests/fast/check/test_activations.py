"""What layers keep for the backward pass: closed forms, and peaks that were measured on one H200."""

import json

import pytest

from miles.check.activations import (
    LayerBytes,
    LayerTraits,
    Recompute,
    head_bytes,
    layer_bytes,
    micro_batches_in_flight,
    stage_bytes,
)
from miles.hf.families import shape_of
from miles.hf.parallel import ParallelSizes
from tests.fast.check.conftest import DENSE
from tests.fast.conftest import ROOT

TINY = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 100,
}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
ONE = ParallelSizes()
FUSED = LayerTraits(qk_norm=True, fused_activation=True)


def kept(fields: dict, sizes: ParallelSizes = ONE, traits: LayerTraits = FUSED) -> float:
    layer = layer_bytes(shape_of(fields), 0, sizes, traits)
    return layer.stream + layer.rest


def test_a_dense_layer():
    # Norms' inputs and outputs; the product; queries copied; both turned; values copied; the output; the MLP; sums.
    h, q, k, f = 8, 24, 12, 24
    assert kept(TINY) == 2 * (4 * h + (q + 2 * k) + q + (q + k) + k + q + 3 * f) + 4 * 4


def test_without_norms_of_queries_the_product_goes():
    h, q, k, f = 8, 24, 12, 24
    assert kept(TINY, traits=LayerTraits(fused_activation=True)) == 2 * (4 * h + (q + k) + k + q + 3 * f) + 4 * 4


def test_an_activation_without_a_kernel_keeps_two_halves_more():
    assert kept(TINY, traits=LayerTraits(qk_norm=True)) - kept(TINY) == 2 * 2 * 24


def test_a_layer_of_experts():
    dense = kept(TINY) - 2 * 3 * 24
    rows = 2 * (2 * (8 + 3 * 10) + 24)
    assert kept(TINY | EXPERTS) == dense + rows + 12 * 16


def test_shared_experts():
    assert kept(TINY | EXPERTS | {"n_shared_experts": 1}) - kept(TINY | EXPERTS) == 2 * 3 * 10


def test_tensor_parallelism_cuts_what_is_inside_and_sequence_parallelism_the_rest():
    h = 8
    whole = kept(TINY)
    inside = whole - 2 * 4 * h
    assert kept(TINY, ParallelSizes(tp=2)) == inside / 2 + 2 * 4 * h
    assert kept(TINY, ParallelSizes(tp=2, sequence_parallel=True)) == whole / 2
    moe = TINY | EXPERTS
    assert kept(moe, ParallelSizes(tp=2, ep=2, sequence_parallel=True)) == kept(moe) / 2


def test_context_parallelism_gathers_keys_and_values():
    k = 12
    assert kept(TINY, ParallelSizes(cp=4)) - kept(TINY) == 3 * 2 * (k + k)


def test_recomputation():
    layer = LayerBytes(stream=1.0, rest=9.0, modules={"core_attn": 2.0, "mlp": 3.0}, passing=0.5)
    chunks = [[layer] * 6]
    assert (stage_bytes(chunks, Recompute()).kept, stage_bytes(chunks, Recompute()).moment) == (60, 0.5)
    some = stage_bytes(chunks, Recompute("full", "block", 2))
    assert (some.kept, some.moment) == (2 * 1 + 4 * 10, 10.5)
    groups = stage_bytes(chunks, Recompute("full", "uniform", 2))
    assert (groups.kept, groups.moment) == (3, 20.5)
    parts = stage_bytes(chunks, Recompute("selective", modules=("core_attn", "mlp")))
    assert (parts.kept, parts.moment) == (6 * 5, 5.5)


def test_micro_batches_in_flight():
    assert [micro_batches_in_flight(stage, 4, 1, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [micro_batches_in_flight(stage, 4, 1, 2) for stage in range(4)] == [2, 2, 2, 1]
    # Narayanan et al.: of two chunks the first stage holds (2 * 3 + 4 + 1) of them, each half a stage.
    assert micro_batches_in_flight(0, 4, 2, 8) == 11 / 2
    assert micro_batches_in_flight(3, 4, 2, 8) == 5 / 2


@pytest.mark.parametrize("file", ["train_step.json", "train_step_te.json"])
def test_measured_peaks(file):
    """Within 1 %: 18 bytes a parameter, the layers, and the output layer."""
    result = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
    for row in result["rows"]:
        fields, tokens = DENSE[row["size"]], row["tokens"]
        responses = tokens * 1792 // 2048
        recompute = Recompute("full", "block", 6) if "--recompute" in row["flags"] else Recompute()
        shape = shape_of(fields)
        layers = [layer_bytes(shape, n, ONE, FUSED) for n in range(fields["num_hidden_layers"])]
        stage = stage_bytes([layers], recompute)
        head = sum(head_bytes(fields["hidden_size"], fields["vocab_size"], tokens, responses, 2048, 2))
        states = 18 * result["notes"][f"{row['size']} parameters"]
        predicted = states + stage.kept * tokens + max(head, stage.moment * tokens)
        assert predicted / 1e9 == pytest.approx(row["peak GB"], rel=0.01), row
