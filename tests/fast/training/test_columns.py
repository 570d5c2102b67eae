"""A column is one declaration: what a sample then holds arrives at the layers, whatever shape an entry has."""

import json
import pickle
from dataclasses import dataclass

import numpy as np
import pytest

from miles.rollout.sample_io import read_samples, save_samples
from miles.rollout.train_data import batch_from, train_data
from miles.training import batch as batches
from miles.training.batch import TrainRows
from miles.training.packing import pack, zigzag_spans
from miles.training.schedule import plan_rollout, shard
from miles.utils.array_list import ArrayList
from miles.utils.columns import ArrayField, columns_of
from miles.utils.types import Sample

LAYERS, TOP_K = 3, 2


@dataclass
class RoutedSample(Sample):
    """A sample with the experts that each of its tokens went to."""

    routed_experts: ArrayField[ArrayList | None] = ArrayField(np.uint8, "token", dims=("layers", "top_k"))


@pytest.fixture(autouse=True)
def declared(monkeypatch):
    """What Miles does where `Sample` declares its own columns."""
    monkeypatch.setattr(batches, "COLUMNS", batches.COLUMNS)
    for column in columns_of(RoutedSample).values():
        monkeypatch.setitem(batches.COLUMNS, column.name, column)


def routed(index, prompt, response):
    draw = np.random.default_rng(index)
    tokens = prompt + response
    return RoutedSample(
        index=index,
        group_index=index // 2,
        tokens=draw.integers(1, 100, tokens),
        response_length=response,
        rollout_log_probs=-draw.random(response),
        reward=1.0,
        routed_experts=draw.integers(1, 256, (tokens, LAYERS, TOP_K)),
        status=Sample.Status.COMPLETED,
    )


def samples():
    return [routed(0, 3, 4), routed(1, 1, 12), routed(2, 5, 1), routed(3, 2, 0), routed(4, 7, 9)]


def test_a_sample_keeps_it_as_what_it_is():
    (sample, *_) = samples()
    assert sample.routed_experts.array.shape == (7, LAYERS, TOP_K) and sample.routed_experts.array.dtype == np.uint8
    for again in (RoutedSample.from_dict(json.loads(json.dumps(sample.to_dict()))), pickle.loads(pickle.dumps(sample))):
        assert again == sample and again.routed_experts == sample.routed_experts.tolist()
    sample.routed_experts += [[[1, 2]] * LAYERS]
    with pytest.raises(ValueError, match="sample 0 of group 0: routed_experts has 8 entries for a sample of 7 tokens"):
        sample.validate()
    sample.reset_for_retry()
    assert sample.routed_experts is None
    with pytest.raises(ValueError, match=r"sample 0: routed_experts = .*each entry of the shape \[layers, top_k\]"):
        sample.routed_experts = [[1, 2]] * 7


def test_it_is_saved_with_the_sample(tmp_path, monkeypatch):
    path = save_samples(str(tmp_path / "{rollout_id}.jsonl"), 0, [samples()])
    monkeypatch.setattr("miles.rollout.sample_io.Sample", RoutedSample)
    assert read_samples(path)[1] == samples()


def test_a_convert_function_gets_it_and_must_return_it():
    data = train_data(samples(), [0.0] * 5)
    assert data["routed_experts"] == [sample.routed_experts.tolist() for sample in samples()]
    rows = batch_from("--flag", data, samples(), rewarded=True)
    assert all(map(np.array_equal, rows["routed_experts"], [sample.routed_experts.array for sample in samples()]))
    data["routed_experts"][1].pop()
    with pytest.raises(ValueError, match="routed_experts has 12 entries for a sample of 13 tokens"):
        batch_from("--flag", data, samples(), rewarded=True)
    del data["routed_experts"]
    with pytest.raises(ValueError, match="--flag returned no routed_experts"):
        batch_from("--flag", data, samples(), rewarded=True)


@pytest.mark.parametrize("cp_size", [1, 2, 3])
def test_from_samples_to_the_tokens_of_each_rank_and_back(cp_size):
    rollout = samples()
    rows = TrainRows.from_samples(rollout, [0.0] * 5)
    sizes = {"global_batch_size": 4, "micro_batch_size": 2, "max_tokens": None, "per_token_loss": False}
    plans, dp_size = plan_rollout(rows, dp_size=2, **sizes), 2
    back = {}
    for dp_rank in range(dp_size):
        part = pickle.loads(pickle.dumps(shard(rows, plans, dp_rank)))
        assert part.batch["routed_experts"].shape == (part.batch["tokens"].size, LAYERS, TOP_K)
        for micro_batch in [rows for step in part.steps for rows in step.micro_batches]:
            for place, tokens, experts in unpacked(part.batch, micro_batch, cp_size):
                row = micro_batch[place]
                if part.batch["token_weights"][row] or not part.batch.response_lengths[row]:  # no filler
                    back[int(part.batch["sample_indices"][row])] = tokens, experts
    assert sorted(back) == [sample.index for sample in rollout]
    for sample in rollout:
        tokens, experts = back[sample.index]
        assert tokens.tolist() == sample.tokens and experts.tolist() == sample.routed_experts


def unpacked(batch, rows, cp_size):
    """(place of the row, its ids, its experts) of each row of a micro-batch, brought together from its ranks."""
    ranks = [pack(batch, rows, 3, "cpu", rank, cp_size) for rank in range(cp_size)]
    offsets = ranks[0].cu_seqlens.tolist()
    tokens = np.zeros(offsets[-1], np.int64)
    experts = np.full((offsets[-1], LAYERS, TOP_K), 99, np.uint8)
    for rank, packed in enumerate(ranks):
        assert packed.token_columns.keys() == {"routed_experts"}
        spans = [
            np.arange(start + first, start + last)
            for start, end in zip(offsets, offsets[1:], strict=False)
            for first, last in zigzag_spans(end - start, rank, cp_size)
        ]
        tokens[np.concatenate(spans)] = packed.tokens_T
        experts[np.concatenate(spans)] = packed.token_columns["routed_experts"]
    assert not experts[tokens == 0].any(), "padding has zeros"
    for place, row in enumerate(rows):
        cut = slice(offsets[place], offsets[place] + batch.total_lengths[row])
        yield place, tokens[cut], experts[cut]
