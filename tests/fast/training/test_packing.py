import numpy as np
import torch

from miles.training.batch import TrainBatch, offsets_of
from miles.training.packing import pack


def make_batch():
    """Samples of 2 + 2, 1 + 3 and 3 + 1 tokens."""
    columns = {
        "tokens": np.arange(1, 13, dtype=np.int32),
        "loss_masks": np.array([1, 1, 1, 0, 1, 1], dtype=np.int8),
        "rollout_log_probs": np.arange(6, dtype=np.float32),
        "rewards": np.array([0.5, -0.5, 2.0], dtype=np.float32),
        "truncated": np.zeros(3, dtype=np.int64),
        "sample_indices": np.arange(3),
        "group_indices": np.zeros(3, dtype=np.int64),
        "rollout_ids": np.arange(3),
        "token_weights": np.array([0.1, 0.2, 0.4], dtype=np.float32),
        "metric_weights": np.array([0.5, 0.25, 1.0], dtype=np.float32),
    }
    return TrainBatch(columns, offsets_of(np.array([4, 4, 4])), offsets_of(np.array([2, 3, 1])))


def test_pack_with_padding():
    packed = pack(make_batch(), [2, 1], 5, "cpu", old_log_probs=torch.arange(6) * 10.0)
    assert packed.tokens_T.tolist() == [9, 10, 11, 12, 5, 6, 7, 8, 0, 0]
    assert packed.position_ids_T.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert packed.cu_seqlens.tolist() == [0, 4, 8, 10] and packed.cu_seqlens.dtype == torch.int32
    assert packed.max_seqlen == 4
    assert packed.logit_index_N.tolist() == [2, 4, 5, 6]
    assert packed.target_N.tolist() == [12, 6, 7, 8]
    assert packed.sample_N.tolist() == [0, 1, 1, 1]
    assert packed.mask_N.tolist() == [True, True, False, True]
    torch.testing.assert_close(packed.weight_N, torch.tensor([0.4, 0.2, 0.0, 0.2]))
    torch.testing.assert_close(packed.metric_weight_N, torch.tensor([1.0, 0.25, 0.0, 0.25]))
    assert packed.columns["rollout_log_probs"].tolist() == [5, 2, 3, 4]
    assert packed.columns["old_log_probs"].tolist() == [50, 20, 30, 40]
    assert packed.sample_columns["rewards"].tolist() == [2.0, -0.5]


def test_pack_without_padding_has_no_extra_sequence():
    packed = pack(make_batch(), [0], 4, "cpu")
    assert packed.cu_seqlens.tolist() == [0, 4]
    assert packed.tokens_T.tolist() == [1, 2, 3, 4]


def test_padding_longer_than_the_samples():
    packed = pack(make_batch(), [0], 128, "cpu")
    assert packed.cu_seqlens.tolist() == [0, 4, 128] and packed.max_seqlen == 124


def test_response_index_puts_results_back():
    batch = make_batch()
    column = torch.zeros(6)
    for rows in ([2, 0], [1]):
        packed = pack(batch, rows, 8, "cpu")
        column[packed.response_index_N] = packed.columns["rollout_log_probs"]
    assert column.tolist() == batch["rollout_log_probs"].tolist()


def test_a_sample_without_a_response():
    columns = {name: values[:1] for name, values in make_batch().columns.items()}
    columns |= {"tokens": np.arange(4, dtype=np.int32), "loss_masks": np.zeros(0, np.int8)}
    del columns["rollout_log_probs"]
    packed = pack(TrainBatch(columns, np.array([0, 4]), np.array([0, 0])), [0], 1, "cpu")
    assert packed.logit_index_N.shape == packed.weight_N.shape == (0,)
