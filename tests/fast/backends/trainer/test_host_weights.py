import pytest
import torch

from miles.backends.trainer import host_weights
from miles.backends.trainer.host_weights import HostWeights
from miles.residency.pinned import HostBuffer


@pytest.fixture
def chunks():
    chunks = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)]
    for chunk in chunks:
        chunk.register_buffer("expert_bias", torch.randn(2))
    return chunks


def weights_of(chunks):
    return [weight for chunk in chunks for weight in chunk.state_dict().values()]


def held_by(chunks):
    """The parameters and buffers themselves."""
    return [weight for chunk in chunks for weight in chunk.state_dict(keep_vars=True).values()]


def copies(tensors):
    return [tensor.clone() for tensor in tensors]


def equal(tensors, others):
    return all(map(torch.equal, tensors, others))


def train(chunks):
    """Change every weight; returns what they are then."""
    for weight in weights_of(chunks):
        weight.add_(1)
    return copies(weights_of(chunks))


def test_the_copy_is_swapped_in_with_the_routers_biases_and_out_again(chunks):
    kept, first = HostWeights(lambda: held_by(chunks), "a test"), copies(weights_of(chunks))
    trained = train(chunks)
    with pytest.raises(RuntimeError), kept.swapped_in():
        assert equal(weights_of(chunks), first)
        raise RuntimeError
    assert equal(weights_of(chunks), trained)
    with kept.swapped_in():
        assert equal(weights_of(chunks), first)


def test_a_swap_that_fails_midway_is_undone(chunks, monkeypatch):
    kept, first = HostWeights(lambda: held_by(chunks), "a test"), copies(weights_of(chunks))
    trained = train(chunks)
    swap, calls = host_weights._swap, []

    def failing(*pair):
        calls.append(pair)
        if len(calls) == 3:
            raise torch.OutOfMemoryError
        swap(*pair)

    monkeypatch.setattr(host_weights, "_swap", failing)
    with pytest.raises(torch.OutOfMemoryError), kept.swapped_in():
        pytest.fail("the block must not run with half of the weights")
    assert equal(weights_of(chunks), trained)
    with kept.swapped_in():
        assert equal(weights_of(chunks), first)


def test_it_takes_the_weights_from_where_they_are(chunks):
    kept, trained = HostWeights(lambda: held_by(chunks), "a test"), train(chunks)
    parameters = [value for chunk in chunks for value in chunk.state_dict(keep_vars=True).values()]
    elsewhere = {id(value): copy for value, copy in zip(parameters, trained, strict=True)}
    with torch.no_grad():
        for weight in weights_of(chunks):
            weight.fill_(torch.nan)  # asleep
    kept.take(lambda tensor: elsewhere[id(tensor)])
    with kept.swapped_in():
        assert equal(weights_of(chunks), trained)


def test_what_is_loaded_while_it_is_in_is_kept(chunks):
    kept, trained = HostWeights(lambda: held_by(chunks), "a test"), train(chunks)
    with kept.swapped_in():
        for weight in weights_of(chunks):
            weight.fill_(7)
    assert equal(weights_of(chunks), trained)
    with kept.swapped_in():
        assert all(bool((weight == 7).all()) for weight in weights_of(chunks))


def test_the_memory_is_that_of_the_weights(chunks, monkeypatch):
    asked = []

    def recorded(nbytes, pinned, remedy):
        asked.append((nbytes, pinned))
        return HostBuffer(nbytes, pinned, remedy)

    monkeypatch.setattr(host_weights, "HostBuffer", recorded)
    # A little above a power of two, which torch's own pinned memory would double.
    chunks = [*chunks, torch.nn.Linear(1025, 1024, dtype=torch.bfloat16), torch.nn.Linear(3, 3, dtype=torch.float64)]
    for chunk in chunks[2:]:
        chunk.register_buffer("expert_bias", torch.randn(1))
    kept, first = HostWeights(lambda: held_by(chunks), "a test"), copies(weights_of(chunks))
    ((nbytes, pinned),) = asked
    exact = sum(weight.nbytes for weight in first)
    assert exact <= nbytes < exact + 64 * len(first) and not pinned
    trained = train(chunks)
    with kept.swapped_in():
        assert equal(weights_of(chunks), first)
    assert equal(weights_of(chunks), trained)


def test_a_host_without_the_memory_is_named(chunks, monkeypatch):
    monkeypatch.setattr("miles.residency.pinned.free_host_bytes", lambda: 1)
    with pytest.raises(
        ValueError, match="bytes of host memory are needed and 1 are free: .* weights of --ref-load model"
    ):
        HostWeights(lambda: held_by(chunks), "--ref-load model")
