"""An optimizer state on disk takes the same steps, saves the same checkpoints, and stops when the disk fails."""

import errno
import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from miles.backends.megatron_utils.streamed_state import MOMENT_DTYPES, NEIGHBOURS, StateFile, _draws, decode, encode
from miles.ray.resume import first_rollout
from miles.utils.network import free_ports
from scripts import loss_trace
from tests.fast.ranks import leave_world

ROLLOUTS = 2  # of two optimizer steps each; saved after the first
CHUNK = 150_000  # bytes: buckets of 4096 elements, so that the embedding alone is in five of them
LARGE_CHUNK = 10 * CHUNK
BF16 = ("--bf16",)
# A step of eight samples has two micro-batches: half of the time, and their number is not what is tested.
FEW = ("--micro-batch-size", "4")

# name -> (ranks, flags, moments or None for Megatron's own optimizer, the run whose checkpoint it loads)
RUNS = {
    "fp32": (1, (), None, None),
    "fp32 streamed": (1, (), "fp32", None),
    "fp32 streamed from plain": (1, (), "fp32", "fp32"),
    "bf16": (1, BF16, None, None),
    "bf16 streamed": (1, BF16, "fp32", None),
    "bf16 from streamed": (1, BF16, None, "bf16 streamed"),
    "bf16 streamed from plain": (1, BF16, "fp32", "bf16"),
    "bf16, moments bf16": (1, BF16, "bf16", None),
    "bf16, moments bf16, large chunk": (1, BF16, "bf16", None),
    "bf16, moments bf16, resumed": (1, BF16, "bf16", "bf16, moments bf16"),
    "DP 2 fp32": (2, (), None, None),
    "DP 2 fp32 streamed": (2, (), "fp32", None),
    "DP 2 bf16": (2, BF16, None, None),
    "DP 2 bf16 streamed": (2, BF16, "fp32", None),
    "DP 2 bf16 from streamed": (2, BF16, None, "DP 2 bf16 streamed"),
    "broken": (2, BF16, "fp32", None),
}


def test_same_steps_and_checkpoints(run_ranks, tiny_checkpoint, tmp_path):
    ports = dict(zip(RUNS, free_ports(len(RUNS)), strict=True))
    run_ranks(__file__, 2, str(tiny_checkpoint), str(tmp_path), json.dumps(ports))
    results = {name: json.loads(min(tmp_path.glob(f"{name}, rank ?.json")).read_text()) for name in RUNS}

    for kind in ("fp32", "bf16", "DP 2 fp32", "DP 2 bf16"):
        plain, streamed = results[kind], results[f"{kind} streamed"]
        assert len(set(plain["weights"])) == ROLLOUTS
        assert (streamed["metrics"], streamed["weights"]) == (plain["metrics"], plain["weights"]), kind
        assert streamed["buckets"] > 10 and streamed["split"] > 2, "the chunk is too large for this test"
        for name in (f"{kind} from streamed", f"{kind} streamed from plain"):
            if name in RUNS:
                resumed = results[name]
                assert resumed["metrics"] == plain["metrics"][1:], name
                assert resumed["weights"] == plain["weights"][1:], name
    # In the loaded run all of it was in memory before: 12 bytes a parameter, 8 where the weights are the masters.
    for name, nbytes in (("fp32 streamed from plain", 8), ("bf16 streamed from plain", 12)):
        assert results[name]["freed"] == nbytes * results[name]["parameters"]
        assert results[name]["left"] == 0

    # Narrow moments: close to the plain run, not equal.
    plain, narrow = results["bf16"], results["bf16, moments bf16"]
    assert narrow["metrics"] != plain["metrics"]
    for found, expected in zip(narrow["metrics"], plain["metrics"], strict=True):
        assert found["train/loss"] == pytest.approx(expected["train/loss"], abs=3e-3)
        assert found["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=0.05)
    # The chunk makes no difference.
    large = results["bf16, moments bf16, large chunk"]
    assert large["buckets"] < narrow["buckets"]
    assert (large["metrics"], large["weights"]) == (narrow["metrics"], narrow["weights"])
    # A checkpoint holds them exactly.
    resumed = results["bf16, moments bf16, resumed"]
    assert (resumed["metrics"], resumed["weights"]) == (narrow["metrics"][1:], narrow["weights"][1:])

    # Only rank 1's disk fails; both ranks stop, and say so at every further step and save.
    for rank in range(2):
        errors = json.loads((tmp_path / f"broken, rank {rank}.json").read_text())["errors"]
        assert len(errors) == 3
        for error in errors:
            assert "of two steps" in error and "restart the run from its last checkpoint" in error
        # The step itself says why on both.
        said = ["no space left on device" in error for error in errors]
        assert said == [True] + 2 * [rank == 1]


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8e4m3", "fp8e5m2"])
@pytest.mark.parametrize("root", [False, True])
def test_error_of_a_narrow_moment(name, root):
    dtype = MOMENT_DTYPES[name]
    info = torch.finfo(dtype)
    generator = torch.Generator().manual_seed(0)
    # Blocks of different sizes, values over eight powers of ten within each, and zeros.
    values = torch.randn(64, NEIGHBOURS, generator=generator) * 10 ** torch.linspace(-12, 3, 64)[:, None]
    values *= 10 ** (torch.rand(64, NEIGHBOURS, generator=generator) * -8)
    values[:, ::7] = 0
    values = (values.square() if root else values).flatten()
    codes, scales = encode(values, dtype, root, seed=1, start=0)
    assert codes.dtype == dtype and len(scales) == 64
    found, expected = decode(codes, scales, root), values
    assert bool((found[values == 0] == 0).all())
    if root:
        assert bool((found[values > 0] > 0).all())
        found, expected = found.sqrt(), expected.sqrt()
    smallest = (scales * info.smallest_normal * info.eps).repeat_interleave(NEIGHBOURS)
    allowed = torch.maximum(expected.abs() * info.eps, smallest) * (1 + 1e-5)
    assert bool(((found - expected).abs() <= allowed).all())
    # What was decoded is kept exactly, whatever is drawn, but for squares too small to be exact in fp32.
    once = decode(codes, scales, root)
    exact = (once == 0) | (once.abs() >= torch.finfo(torch.float32).tiny)
    for seed in range(2, 8):
        assert torch.equal(decode(*encode(once, dtype, root, seed, start=0), root)[exact], once[exact])


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8e4m3", "fp8e5m2"])
def test_a_narrow_moment_still_moves(name):
    # A step changes it by a thousandth, less than a narrow format resolves.
    beta, steps = 0.999, 300
    start = torch.linspace(0.5, 1, 8 * NEIGHBOURS)
    codes, scales = encode(start, MOMENT_DTYPES[name], root=True, seed=0, start=0)
    for seed in range(steps):
        moved = decode(codes, scales, root=True) * beta
        codes, scales = encode(moved, MOMENT_DTYPES[name], root=True, seed=seed, start=0)
    mean = decode(codes, scales, root=True).mean().item() / start.mean().item()
    assert mean == pytest.approx(beta**steps, rel=0.1)


@pytest.mark.parametrize("start", [0, (2**24 + 5) * NEIGHBOURS, (2**31 - 9) * NEIGHBOURS])
def test_what_is_drawn_depends_on_step_and_position_alone(start):
    rows, first = 16, start // NEIGHBOURS
    values = torch.rand(rows * NEIGHBOURS, generator=torch.Generator().manual_seed(0))
    whole, _ = encode(values, torch.bfloat16, False, seed=3, start=start)
    for cut in (NEIGHBOURS, 5 * NEIGHBOURS):
        codes = [encode(values[:cut], torch.bfloat16, False, 3, start)[0]]
        codes.append(encode(values[cut:], torch.bfloat16, False, 3, start + cut)[0])
        assert torch.equal(torch.cat(codes), whole)
    assert not torch.equal(encode(values, torch.bfloat16, False, seed=4, start=start)[0], whole)
    assert not torch.equal(encode(values, torch.bfloat16, False, seed=3, start=start + NEIGHBOURS)[0], whole)

    def mixed(x):  # lowbias32, in numbers without a sign
        x = (x ^ x >> 16) * 0x7FEB352D % 2**32
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    found = _draws(3, first, rows, torch.device("cpu"))
    for row, column in ((0, 0), (0, 255), (7, 100), (15, 1)):
        expected = mixed(mixed((first + row) % 2**31 ^ mixed(3)) ^ column) % 2**24 / 2**24
        assert found[row, column].item() == expected


def test_draws_are_uniform_and_independent():
    draws = torch.cat([_draws(seed, 0, 512, torch.device("cpu")) for seed in range(8)]).double()
    tenths = torch.histc(draws, 10, 0, 1) / draws.numel()
    assert tenths.sub(0.1).abs().max() < 0.002  # 7 standard deviations
    steps = draws.view(8, -1)
    for a, b in ((draws[:, :-1], draws[:, 1:]), (draws[:-1], draws[1:]), (steps[:-1], steps[1:])):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.006  # 5 standard deviations


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=rf"24(,\d{{3}}){{4}} bytes for the optimizer .* in {tmp_path} .* which has [\d,]+ bytes free"
    ):
        StateFile(str(tmp_path), 2 * 10**12, True, torch.float32, 10**6, pinned=False)
    with pytest.raises(ValueError, match="chunk of 100000 bytes is too small .* at least 147456"):
        StateFile(str(tmp_path), 10**6, True, torch.float32, 10**5, pinned=False)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="/dev/shm/optimizer, is in memory .tmpfs."):
        StateFile("/dev/shm/optimizer", 10**6, True, torch.float32, 10**6, pinned=False)


@pytest.mark.parametrize("elements", [1, 4096, 100_000])
@pytest.mark.parametrize("name", MOMENT_DTYPES)
def test_every_position_passes_once(tmp_path, elements, name):
    file = StateFile(str(tmp_path), elements, True, MOMENT_DTYPES[name], CHUNK, pinned=False)
    assert list(tmp_path.iterdir()) == []
    assert file.buckets * file.bucket_elements >= elements

    def number(index, slot):
        bucket = file.bucket(slot)
        assert not bucket.masters.any() and not any(moment.any() for moment in bucket.moments())
        start = index * file.bucket_elements
        bucket.masters.copy_(torch.arange(start, start + file.bucket_elements))
        moment = torch.full_like(bucket.masters, 4.0 ** (index % 7))
        if MOMENT_DTYPES[name] == torch.float32:
            bucket.exp_avg.copy_(moment)
            bucket.exp_avg_sq.copy_(moment)
        else:
            bucket.store_moments(moment, moment, seed=index, start=start)
        return lambda: None

    file.stream(number)
    whole = file.mapped()
    assert torch.equal(whole.masters, torch.arange(file.buckets * file.bucket_elements).float())
    expected = (4.0 ** (torch.arange(file.buckets) % 7)).repeat_interleave(file.bucket_elements)
    for moment in whole.moments():
        assert torch.equal(moment, expected)


def test_a_mapped_file_takes_nothing_of_the_memory_that_may_be_promised(tmp_path):
    # Where the kernel keeps to such a limit, writable pages of its own count in full, though none is ever written.
    file = StateFile(str(tmp_path), 100_000, True, torch.float32, CHUNK, pinned=False)
    inode, whole = os.fstat(file._file.file.fileno()).st_ino, file.mapped()
    assert not whole.masters.any()
    areas = re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text())
    (area,) = [area for area in areas if area.split()[4] == str(inode)]
    assert "ac" not in re.search(r"VmFlags: (.*)", area)[1].split()


def main(rank, checkpoint, folder, ports):
    # First each rank for itself, one all in fp32 and one all in bf16, then both together.
    mine = [name for name, (ranks, flags, *_) in RUNS.items() if ranks == 1 and (flags == BF16) == (rank == 1)]
    for name in mine + [name for name, (ranks, *_) in RUNS.items() if ranks == 2]:
        ranks, flags, moments, source = RUNS[name]
        scratch = folder / f"{name}, rank {rank}"
        scratch.mkdir()
        flags = [*flags, "--save", str(folder / name), *(("--load", str(folder / source)) if source else ())]
        config = loss_trace.trace_config(checkpoint, ranks, ROLLOUTS, [*FEW, *flags], scratch)
        chunk = LARGE_CHUNK if "large" in name else CHUNK
        result = run(config, rank if ranks == 2 else 0, ranks, ports[name], moments, chunk, "broken" in name)
        (folder / f"{name}, rank {rank}.json").write_text(json.dumps(result))


def run(config, rank, ranks, port, moments, chunk, breaks):
    from megatron.core import parallel_state

    from miles.backends.megatron_utils.actor import MegatronTrainRayActor
    from miles.backends.megatron_utils.streamed_optimizer import StreamedOptimizer
    from miles.utils.checkpoint_folder import finish_checkpoint

    torch.set_num_threads(1)
    actor = MegatronTrainRayActor(config, rank, ranks)
    actor.init(f"127.0.0.1:{port}")
    optimizer = actor.model.state.optimizer.chained_optimizers[0]
    result = {"metrics": [], "weights": [], "errors": []}
    if moments is not None:
        before = {StorageWeakRef(tensor.untyped_storage()): tensor.numel() * 4 for tensor in state_tensors(optimizer)}
        streamed = StreamedOptimizer(
            actor.model.state, config.run_dir, chunk, MOMENT_DTYPES[moments], False, actor.agreement
        )
        result["freed"] = sum(nbytes for storage, nbytes in before.items() if storage.expired())
        result["parameters"] = sum(parameter.numel() for parameter in optimizer.get_parameters())
        result["buckets"] = streamed._file.buckets
        result["split"] = max(
            sum(part.shard is shard for parts in streamed._parts for part in parts) for shard in streamed._shards
        )
    mine = loss_trace.made_up_shard(config, actor.model.hf_config.vocab_size, parallel_state.get_data_parallel_rank())
    if breaks:
        result["errors"] = errors_of_a_broken_run(actor, mine, fails=rank == ranks - 1)
    else:
        for rollout_id in range(first_rollout(actor.config), ROLLOUTS):
            metrics = actor.train(rollout_id, mine)
            result["metrics"].append({name: value for name, value in metrics.items() if name.startswith("train/")})
            result["weights"].append(digest(actor.model.chunks[0]))
            if rollout_id == 0:
                actor.save(rollout_id)
                if rank == 0:
                    finish_checkpoint(config.save, rollout_id)
        if moments is not None:
            result["left"] = sum(t.untyped_storage().nbytes() for t in state_tensors(optimizer) if t.stride() != (0,))
    leave_world()
    return result


def state_tensors(optimizer):
    """Masters and moments, not what aliases the weights."""
    masters = [master for group in optimizer.shard_fp32_from_float16_groups for master in group]
    states = optimizer.optimizer.state.values()
    return masters + [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]


def errors_of_a_broken_run(actor, shard, fails):
    """What the third step, the one after it and a save say when the third step's third write fails."""
    actor.train(0, shard)
    original, calls, errors = os.pwrite, 0, []

    def failing(*arguments):
        nonlocal calls
        calls += 1
        if fails and calls == 3:
            raise OSError(errno.ENOSPC, "no space left on device")
        return original(*arguments)

    os.pwrite = failing
    for call in (lambda: actor.train(1, shard), lambda: actor.train(1, shard), lambda: actor.save(1)):
        try:
            call()
        except RuntimeError as error:
            errors.append(str(error))
        os.pwrite = original
    return errors


def digest(model):
    """Of every bit of the rank's weights."""
    import hashlib

    values = hashlib.sha256()
    for parameter in model.parameters():
        values.update(parameter.detach().view(torch.uint8).numpy().tobytes())
    return values.hexdigest()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[4], Path(sys.argv[5]), json.loads(sys.argv[6]))
