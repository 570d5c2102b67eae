"""What fails on one of two ranks is heard on the other, at every place where it would wait in vain. On gloo ranks."""

import contextlib
import errno
import json
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from miles.utils.network import free_port
from tests.fast.backends.megatron_utils.test_residency import build

KINDS = (
    torch.OutOfMemoryError("CUDA out of memory"),
    OSError(errno.ENOSPC, "No space left on device"),
    AssertionError("3 shards"),
)
NAMES = ("OutOfMemoryError", "OSError", "AssertionError", "SafetensorError")
FLAGS = ("--bf16",)
STREAMED = ("--stream-optimizer-state-to-disk",)


def test_a_failure_is_heard_everywhere_and_the_next_try_succeeds(run_ranks, tiny_checkpoint, tmp_path):
    run_ranks(__file__, 2, str(tiny_checkpoint), str(tmp_path), str(free_port()))
    for rank in range(2):
        results = json.loads((tmp_path / f"rank {rank}.json").read_text())
        assert len(results) == 9 * len(NAMES)
        for place, failing, kind, error, seconds in results:
            what = f"{place}: {error}"
            assert seconds < 20, what
            writes = place.startswith(("saving", "exporting"))
            of_the_disk = writes and kind in ("OSError", "SafetensorError")
            if rank == failing:
                assert error.startswith("UserError: " if of_the_disk else f"{kind}: ") and kind in error, what
            elif place != "sleeping":  # groups leave first: what follows of a sleep is every rank's own
                assert error.startswith("AnotherRankFailed: "), what
                assert kind in error or place == "saving, Megatron's part", what  # which says no more elsewhere
            if of_the_disk or (writes and rank != failing):
                assert str(tmp_path) in error, what


# --- what the ranks run ---


def main(rank, checkpoint, folder, port):
    from safetensors import SafetensorError

    torch.set_num_threads(1)
    own = folder / f"of rank {rank}"
    flags = (*FLAGS, "--save", str(folder / "saved"), "--save-hf", str(folder / "export"))
    actor, shard = build(rank, 2, checkpoint, own, port, flags, STREAMED)
    actor.connect([])
    kinds = (*KINDS, SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"))
    results = []
    for place, failing, faults, call in places(actor, shard):
        for kind in kinds:
            found = outcome(call, faults if rank == failing else [], kind)
            results.append([place, failing, type(kind).__name__, *found])
            recover(actor)
        call()
    (folder / f"rank {rank}.json").write_text(json.dumps(results))
    an_agreement_that_fails(rank, actor.agreement)


def places(actor, shard):
    """(place, the rank that fails, what of it fails, what both ranks call)."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    from miles.backends.trainer import checkpoint
    from miles.hf.writer import HFWriter
    from miles.weight_sync import updater

    store = actor.residency.store
    yield "training", 1, [(actor.model.streamed, "_update")], lambda: actor.train(0, shard)
    yield "saving, the folder", 0, [(checkpoint, "begin_checkpoint")], lambda: actor.save(0)
    yield "saving, Megatron's part", 0, [(filesystem_async, "_write_item")], lambda: actor.save(0)
    yield "saving, ours", 1, [(checkpoint.torch, "save")], lambda: actor.save(0)
    yield "exporting", 0, [(HFWriter, "write")], lambda: actor.export_hf(0)
    yield "syncing, room", 1, [(updater, "empty_bucket")], lambda: actor.update_weights(1)
    yield "syncing, reading", 1, [(actor.residency, "read_weight")], lambda: actor.update_weights(1)
    yield "sleeping", 1, [(store, "save")], lambda: (actor.wake_up(), actor.sleep())
    yield "waking", 1, [(store, "load")], lambda: (actor.sleep(), actor.wake_up())


def outcome(call, faults, kind):
    """What `call` raises, in a line, while each of `faults` raises `kind`; and the seconds it took."""
    from miles.utils.errors import one_line

    begin, error = time.monotonic(), ""
    kind.__notes__ = []
    with contextlib.ExitStack() as stack:
        for owner, name in faults:
            stack.enter_context(mock.patch.object(owner, name, mock.Mock(side_effect=kind)))
        try:
            call()
        except Exception as failure:
            # Of a step that failed midway the cause comes behind what it means.
            error = one_line(failure.__cause__ if "midway" in str(failure) and failure.__cause__ else failure)
    return error, time.monotonic() - begin


def recover(actor):
    """The optimizer's state is of two steps now, which does not matter here."""
    actor.model.streamed._problem = None
    actor.wake_up()


def an_agreement_that_fails(rank, agreement):
    """The other rank is elsewhere and does not come: the cause is raised all the same."""
    from miles.utils import agreement as module

    if rank == 0:
        time.sleep(3)
        return
    with mock.patch.object(module, "TELLING_SECONDS", 0.2):
        begin = time.monotonic()
        with pytest.raises(KeyError, match="mine"), agreement.alone("a test"):
            raise KeyError("mine")
        assert time.monotonic() - begin < 3


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[4], Path(sys.argv[5]), int(sys.argv[6]))
