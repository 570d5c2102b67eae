"""A second set of weights beside a GPU takes pinned memory of its size, and comes and goes without changing a bit."""

from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def test_pinned_memory_of_the_size_of_the_weights():
    from miles.backends.trainer.host_weights import HostWeights

    # 17 weights of 33 MB, a little above a power of two.
    model = torch.nn.ModuleList(
        [torch.nn.Linear(4128, 4096, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(17)]
    )
    exact = sum(weight.nbytes for weight in model.parameters())
    first = [weight.detach().clone() for weight in model.parameters()]
    before = resident_bytes()
    kept = HostWeights(lambda: list(model.parameters()), "a test")
    taken = resident_bytes() - before
    print(f"{exact:,} bytes of weights took {taken:,} bytes of host memory")
    assert exact * 0.99 < taken < exact * 1.05
    assert all(weight.is_pinned() for weight in kept._weights)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1)
    trained = [weight.detach().clone() for weight in model.parameters()]
    with kept.swapped_in():
        assert all(map(torch.equal, model.parameters(), first))
    assert all(map(torch.equal, model.parameters(), trained))
