"""`run_ranks`: every start is a fresh process, and what fails or hangs is said; `leave_world` leaves nothing behind."""

import gc
import json
import os
import random
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from miles.utils.network import free_ports
from scripts import loss_trace
from tests.fast.ranks import leave_world

PP2 = ("--pipeline-model-parallel-size", "2")


def test_nothing_of_a_start_is_left_in_the_next(run_ranks):
    for _ in range(2):
        run_ranks(__file__, 2, "dirty")


def test_a_rank_that_fails_is_quoted_and_ends_the_others(run_ranks):
    begin = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match="(?s)ranks ended with .*--- rank 1, 1\n.*KeyError: 'of rank 1'"):
        run_ranks(__file__, 2, "fail")
    assert time.monotonic() - begin < 60, "it waited for the other rank"


def test_a_rank_that_hangs_is_ended(run_ranks):
    with pytest.raises(pytest.fail.Exception, match="(?s)stopped after 3 s .*--- rank 0, None\n.*before it hung"):
        run_ranks(__file__, 1, "hang", timeout=3)


def test_a_world_that_was_left_is_gone(run_ranks, tiny_checkpoint, tmp_path):
    """Groups of other sizes each time; the last run gives what the first gave, to the last bit."""
    run_ranks(__file__, 2, "worlds", str(tiny_checkpoint), str(tmp_path), json.dumps(free_ports(3)))
    first, _, last = (json.loads((tmp_path / f"{number}.json").read_text()) for number in range(3))
    assert first == last


# --- what the ranks run ---


def state() -> tuple:
    """All that one case could leave to the next in its process."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import layers

    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.initial_seed() == 5,
        random.random() == random.Random(5).random(),
        dist.is_initialized(),
        parallel_state.model_parallel_is_initialized(),
        parallel_state._GLOBAL_MEMORY_BUFFER is None,
        hasattr(layers, "left_by_a_test"),
        "LEFT_BY_A_TEST" in os.environ,
    )


def dirty(rank: int, size: int, store: str) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import layers

    assert state() == (torch.float32, True, False, False, False, False, False, True, False, False)
    assert not hasattr(sys.modules["__main__"], "__file__"), "a process that this one spawns would import it"
    torch.set_default_dtype(torch.bfloat16)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(5)
    random.seed(5)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(2)
    layers.left_by_a_test = os.environ["LEFT_BY_A_TEST"] = "1"
    assert state() == (torch.bfloat16, False, True, True, True, True, True, False, True, True)
    dist.barrier()


def fail(rank: int) -> None:
    if rank == 1:
        raise KeyError("of rank 1")
    time.sleep(300)


def hang() -> None:
    print("before it hung", flush=True)
    time.sleep(300)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def worlds(rank: int, checkpoint: str, folder: Path, ports: list[int]) -> None:
    left = []
    for number, flags in enumerate([(), PP2, ()]):
        scratch = folder / f"{number}, rank {rank}"
        scratch.mkdir()
        config = loss_trace.trace_config(checkpoint, 2, 1, [*flags], scratch)
        loss_trace.trace(rank, 2, config, 1, ports[number], folder / f"{number}.json")
        assert threads() > 30, "there is little to leave"
        leave_world()
        left.append(threads())
        assert not [found for found in gc.get_objects() if isinstance(found, torch.nn.Module)]
    assert left == left[:1] * 3 and left[0] < 15, left


if __name__ == "__main__":
    number, world_size, rendezvous, what, *arguments = sys.argv[1:]
    if what == "dirty":
        dirty(int(number), int(world_size), rendezvous)
    elif what == "fail":
        fail(int(number))
    elif what == "hang":
        hang()
    else:
        worlds(int(number), arguments[0], Path(arguments[1]), json.loads(arguments[2]))
