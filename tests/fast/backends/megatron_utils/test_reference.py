import pytest
import torch

from miles.backends.megatron_utils.reference import ReferenceWeights


def test_the_reference_is_swapped_in_with_the_routers_biases_and_out_again():
    chunks = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)]
    for chunk in chunks:
        chunk.register_buffer("expert_bias", torch.randn(2))
    weights = [weight for chunk in chunks for weight in chunk.state_dict().values()]
    reference, first = ReferenceWeights(chunks), [weight.clone() for weight in weights]
    for weight in weights:
        weight.add_(1)
    trained = [weight.clone() for weight in weights]
    with pytest.raises(RuntimeError), reference.swapped_in(chunks):
        assert all(map(torch.equal, weights, first))
        raise RuntimeError
    assert all(map(torch.equal, weights, trained))
    with reference.swapped_in(chunks):
        assert all(map(torch.equal, weights, first))
