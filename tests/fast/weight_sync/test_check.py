import pytest

from miles.weight_sync.check import compare


def test_a_tensor_that_no_update_restores_is_named_unless_nothing_reads_it():
    before = [{"model.norm.weight": "1", "model.normalizer": "2"}]
    compare("URL", before, [before[0] | {"model.normalizer": "3"}], {"model.norm.weight": "1"})
    with pytest.raises(RuntimeError, match="1 tensors of URL were not overwritten by an update: model.norm.weight"):
        compare("URL", before, [before[0] | {"model.norm.weight": "3"}], {"model.norm.weight": "1"})
