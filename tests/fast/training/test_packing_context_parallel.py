"""What context-parallel ranks hold of a micro-batch, put together again."""

import numpy as np
import pytest
import torch

from miles.training.batch import TrainBatch, offsets_of
from miles.training.packing import pack, ranges, zigzag_spans

LENGTHS, RESPONSES = [11, 4, 29, 7], [6, 3, 20, 1]


def make_batch():
    generator = np.random.default_rng(0)
    total, responses, samples = sum(LENGTHS), sum(RESPONSES), len(LENGTHS)
    columns = {
        "tokens": np.arange(1, total + 1, dtype=np.int32),
        "loss_masks": generator.integers(0, 2, responses, dtype=np.int8),
        "rollout_log_probs": generator.random(responses, dtype=np.float32),
        "rewards": generator.random(samples, dtype=np.float32),
        "truncated": np.zeros(samples, dtype=np.int64),
        "sample_indices": np.arange(samples),
        "group_indices": np.zeros(samples, dtype=np.int64),
        "rollout_ids": np.arange(samples),
        "token_weights": generator.random(samples, dtype=np.float32),
        "metric_weights": generator.random(samples, dtype=np.float32),
    }
    return TrainBatch(columns, offsets_of(np.array(LENGTHS)), offsets_of(np.array(RESPONSES)))


ROWS = [2, 0, 3]
PAD_MULTIPLE = 3  # so that the padding behind the samples, too, must be rounded up to whole chunks


def parts(size):
    extra = torch.arange(sum(RESPONSES)) * 10.0
    return [pack(make_batch(), ROWS, PAD_MULTIPLE, "cpu", rank, size, old_log_probs=extra) for rank in range(size)]


def whole(size, values):
    """Per-token values of the ranks in the order of the whole micro-batch."""
    offsets = values[0][0].cu_seqlens.tolist()
    result = torch.full((offsets[-1],), -1)
    for rank, (packed, per_token) in enumerate(values):
        spans = [
            (start + first, start + last)
            for start, end in zip(offsets, offsets[1:], strict=False)
            for first, last in zigzag_spans(end - start, rank, size)
        ]
        places = torch.cat([torch.arange(*span) for span in spans])
        assert len(places) == len(packed.tokens_T)
        result[places] = per_token
    return result, offsets


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_parts_are_the_sequences(size):
    ranks = parts(size)
    assert len({len(packed.tokens_T) for packed in ranks}) == 1 and len(ranks[0].tokens_T) % PAD_MULTIPLE == 0
    tokens, offsets = whole(size, [(packed, packed.tokens_T) for packed in ranks])
    positions, _ = whole(size, [(packed, packed.position_ids_T) for packed in ranks])
    batch = make_batch()
    for start, end, row in zip(offsets, offsets[1:], ROWS, strict=False):
        assert size == 1 or (end - start) % (2 * size) == 0
        length = LENGTHS[row]
        assert tokens[start : start + length].tolist() == batch.row("tokens", row).tolist()
        assert end - start - length < 2 * size and not tokens[start + length : end].any()
    for start, end in zip(offsets, offsets[1:], strict=False):
        assert positions[start:end].tolist() == list(range(end - start))
    lengths = np.diff(offsets)
    assert ranks[0].max_seqlen == lengths.max() and ranks[0].cu_seqlens.dtype == torch.int32
    # Padding behind the samples is a sequence of its own, or there is none.
    assert not tokens[offsets[len(ROWS)] :].any() and len(lengths) - len(ROWS) in (0, 1)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_response_token_is_where_its_logits_are(size):
    batch, found = make_batch(), {}
    for packed in parts(size):
        for name in ("target_N", "weight_N", "mask_N", "sample_N", "response_index_N"):
            assert len(getattr(packed, name)) == len(packed.logit_index_N), name
        assert torch.equal(packed.columns["old_log_probs"], packed.response_index_N * 10.0)
        for n, index in enumerate(packed.response_index_N.tolist()):
            row = int(np.searchsorted(batch.response_offsets, index, side="right")) - 1
            place = LENGTHS[row] - RESPONSES[row] + index - batch.response_offsets[row]
            logit = packed.logit_index_N[n]
            assert packed.tokens_T[logit] == batch.row("tokens", row)[place - 1]
            assert packed.position_ids_T[logit] == place - 1
            assert packed.target_N[n] == batch.row("tokens", row)[place]
            assert ROWS[packed.sample_N[n]] == row
            assert packed.mask_N[n] == bool(batch["loss_masks"][index])
            assert packed.weight_N[n] == (batch["token_weights"][row] if packed.mask_N[n] else 0)
            assert packed.metric_weight_N[n] == (batch["metric_weights"][row] if packed.mask_N[n] else 0)
            assert packed.columns["rollout_log_probs"][n] == batch["rollout_log_probs"][index]
            assert index not in found, "two ranks have this token"
            found[index] = packed
        assert packed.sample_columns["rewards"].tolist() == batch["rewards"][ROWS].tolist()
    assert sorted(found) == sorted(i for row in ROWS for i in range(*batch.response_offsets[row : row + 2]))


def test_ranks_share_the_work():
    for size in (2, 3, 4):
        spans = [zigzag_spans(24 * size, rank, size) for rank in range(size)]
        assert sorted(i for rank in spans for a, b in rank for i in range(a, b)) == list(range(24 * size))
        assert len({sum(a + b for a, b in rank) for rank in spans}) == 1, "each sees equally many keys"


def test_ranges_may_be_empty():
    assert ranges(np.array([5, 9, 1]), np.array([2, 0, 3])).tolist() == [5, 6, 1, 2, 3]
    assert ranges(np.array([], dtype=np.int64), np.array([], dtype=np.int64)).tolist() == []
