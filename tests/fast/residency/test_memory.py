import gc
import mmap
import re
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from miles.residency import memory as module
from miles.residency.memory import CpuMemory, TorchMemorySaverMemory, device_memory, pack, span


def resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


class EndsTheProcess(BaseException):
    """What the real torch_memory_saver does on an illegal call."""


class FakeSaver:
    """torch_memory_saver's rules, and faults on request. Memory stays where it is: these tests run on a CPU."""

    def __init__(self):
        self.paused: dict[str, bool] = {}
        self.calls: list[str] = []
        self.fail = False

    @contextmanager
    def region(self, tag, enable_cpu_backup):
        assert enable_cpu_backup is False
        self.calls.append(f"region {tag}")
        yield
        self.paused[tag] = False

    def pause(self, tag):
        self._move(tag, True)

    def resume(self, tag):
        self._move(tag, False)

    def _move(self, tag, paused):
        if self.paused.get(tag) is not (not paused):
            raise EndsTheProcess(tag)
        self.calls.append(f"{'pause' if paused else 'resume'} {tag}")
        if self.fail:
            raise OSError("injected")
        self.paused[tag] = paused


@pytest.fixture
def free(monkeypatch):
    """The GPU's calls without a GPU; a list of the free bytes that mem_get_info says next, the last one for ever."""
    free = [2**40]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free.pop(0) if len(free) > 1 else free[0], 2**40))
    return free


@pytest.fixture
def saver():
    return FakeSaver()


@pytest.fixture(params=["cpu", "torch_memory_saver"])
def memory(request, free, saver):
    return (
        CpuMemory()
        if request.param == "cpu"
        else TorchMemorySaverMemory(saver, "cpu", margin_bytes=0, remedy="do this")
    )


def test_allocate_gives_zeros_and_counts(memory):
    first, second = memory.allocate(1000, "a"), memory.allocate(24, "a")
    assert first.dtype == torch.uint8 and first.shape == (1000,) and not first.any() and not second.any()
    assert memory.release("a") == 1024
    assert memory.restore("a") == 1024


def test_rehome_keeps_or_zeroes_and_the_storage_stays_the_same(memory):
    kept, zeroed = torch.randn(100), torch.randn(50).bfloat16()
    view, copy, identity = kept[10:20], kept.clone(), kept.untyped_storage()._cdata
    memory.rehome(kept.untyped_storage(), "a", keep=True)
    memory.rehome(zeroed.untyped_storage(), "b", keep=False)
    assert torch.equal(kept, copy) and torch.equal(view, copy[10:20]) and not zeroed.any()
    assert kept.untyped_storage()._cdata == view.untyped_storage()._cdata == identity
    assert (memory.release("a"), memory.release("b")) == (400, 100)


def test_cpu_memory_is_really_freed_under_every_view():
    memory = CpuMemory()
    before = resident()
    buffer = memory.allocate(100_000_000, "a")
    buffer.fill_(7)
    view = buffer.view(torch.float32)[5:10]
    full = resident()
    assert full - before > 95e6
    assert memory.release("a") == 100_000_000
    assert buffer.untyped_storage().nbytes() == 0 and full - resident() > 95e6
    assert memory.restore("a") == 100_000_000
    view.fill_(1.5)
    assert buffer.view(torch.float32)[4:11].tolist()[1:6] == [1.5] * 5
    assert buffer.untyped_storage().nbytes() == 100_000_000


ILLEGAL = [
    ([], "release", "empty"),
    ([], "restore", "empty"),
    (["allocate"], "restore", "mapped"),
    (["allocate", "release"], "release", "released"),
    (["allocate", "release"], "allocate", "released"),
    (["allocate", "release"], "rehome", "released"),
    (["allocate", "release", "restore"], "restore", "mapped"),
]


def call(memory, verb):
    if verb == "allocate":
        memory.allocate(8, "weights")
    elif verb == "rehome":
        memory.rehome(torch.ones(8).untyped_storage(), "weights", keep=True)
    else:
        getattr(memory, verb)("weights")


@pytest.mark.parametrize("history, verb, state", ILLEGAL)
def test_an_illegal_transition_is_an_error_and_never_reaches_the_saver(memory, saver, history, verb, state):
    memory.allocate(8, "other")
    for step in history:
        call(memory, step)
    calls = list(saver.calls)
    with pytest.raises(RuntimeError, match=f"'weights': it is {state}, expected"):
        call(memory, verb)
    assert saver.calls == calls
    memory.release("other")  # the other tag is as it was


def test_a_failure_in_the_saver_leaves_the_tag_broken(free, saver):
    memory = TorchMemorySaverMemory(saver, "cpu", margin_bytes=0, remedy="do this")
    memory.allocate(8, "a")
    saver.fail = True
    with pytest.raises(OSError, match="injected"):
        memory.release("a")
    saver.fail = False
    for verb in (memory.release, memory.restore):
        with pytest.raises(RuntimeError, match="'a': it is broken"):
            verb("a")


def test_restore_waits_for_room(free, saver):
    memory = TorchMemorySaverMemory(saver, "cpu", margin_bytes=1000, remedy="do this")
    memory.allocate(30_000_000, "a")
    memory.release("a")
    room = 15 * 2**21 + 1000  # 30 MB take fifteen pieces of 2 MiB
    free[:] = [0, room - 1, room, 0]
    assert memory.restore("a") == 30_000_000
    assert free == [0]  # all of them were asked for, and no more


def test_without_room_restore_raises_with_the_figures_and_can_be_tried_again(free, saver, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    memory = TorchMemorySaverMemory(saver, "cpu", margin_bytes=12_345, remedy="do this")
    memory.allocate(30_000_000, "a")
    memory.release("a")
    free[:] = [777]
    with pytest.raises(
        torch.OutOfMemoryError,
        match=r"'a': 31,457,280 .* 12,345 .* 777 were free.*Else lower --train-memory-margin-bytes, or do this$",
    ):
        memory.restore("a")
    assert "resume a" not in saver.calls
    free[:] = [2**40]
    memory.restore("a")


@pytest.mark.parametrize("verb", ["allocate", "rehome"])
def test_new_memory_waits_for_room_too_and_without_it_never_reaches_the_saver(free, saver, monkeypatch, verb):
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    memory, room = TorchMemorySaverMemory(saver, "cpu", margin_bytes=2**40, remedy="do this"), 15 * 2**21

    def take():
        if verb == "allocate":
            memory.allocate(30_000_000, "a")
        else:
            memory.rehome(torch.ones(30_000_000, dtype=torch.uint8).untyped_storage(), "a", keep=False)

    free[:] = [room - 1]
    with pytest.raises(
        torch.OutOfMemoryError, match=r"no room to add 30,000,000 bytes to tag 'a': 31,457,280 .*\? Else do this$"
    ):
        take()
    assert saver.calls == []
    free[:] = [0, room]
    take()
    assert saver.calls == ["region a"]


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_refused_on_a_gpu_only(variable, monkeypatch):
    monkeypatch.setenv(variable, "max_split_size_mb:64,expandable_segments:True")
    with pytest.raises(ValueError, match=re.escape(f"{variable}=max_split_size_mb:64,expandable_segments:True")):
        device_memory("cuda", 0, "do this")
    assert isinstance(device_memory("cpu", 0, "do this"), CpuMemory)


def mixed_tensors() -> list[torch.Tensor]:
    return [
        torch.nn.Parameter(torch.randn(3, 5)),
        torch.tensor([float("nan"), -0.0, 1.0]).bfloat16(),
        torch.randn(7).to(torch.float8_e4m3fn),
        torch.tensor([True, False, True]),
        torch.tensor(5, dtype=torch.int64),
        torch.empty(0, 4),
        torch.randn(4, 6).t(),
    ]


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist())


def test_pack_keeps_contents_dtypes_shapes_and_identity(memory):
    tensors = mixed_tensors()
    expected = [(raw(t), t.dtype, t.shape, t.stride()) for t in tensors]
    parameter = tensors[0]
    buffer = pack(tensors, memory, "a")
    assert [(raw(t), t.dtype, t.shape, t.stride()) for t in tensors] == expected
    assert tensors[0] is parameter and parameter.requires_grad and parameter.is_leaf
    assert {t.untyped_storage()._cdata for t in tensors} == {buffer.untyped_storage()._cdata}
    assert all(t.storage_offset() * t.element_size() % 256 == 0 for t in tensors)
    parameter.sum().backward()
    assert torch.equal(parameter.grad, torch.ones(3, 5))
    assert buffer.shape == (256 * 6,) and memory.release("a") == len(buffer)


def test_packed_contents_survive_release_and_restore():
    memory, tensors = CpuMemory(), mixed_tensors()
    expected = [raw(t) for t in tensors]
    buffer = pack(tensors, memory, "a")
    copy = buffer.clone()
    memory.release("a")
    memory.restore("a")
    buffer.copy_(copy)
    assert [raw(t) for t in tensors] == expected


def test_pack_keeps_aliases(memory):
    flat = torch.arange(1000, dtype=torch.float32)
    weight, bias = torch.nn.Parameter(flat[10:110].view(10, 10)), torch.nn.Parameter(flat[110:120])
    shard = flat[50:115]  # of both, as the distributed optimizer cuts them
    halves = flat.view(torch.bfloat16)[1999:2000]
    alone, twin = torch.arange(5), torch.arange(5)
    buffer = pack([shard, bias, alone, weight, flat, halves, twin, shard], memory, "a")
    assert len(buffer) == 4096 + 256 + 256
    flat[60] = -1
    flat[111] = -2
    bias.data[5] = -3
    assert weight[5, 0] == -1 and shard[10] == -1 and bias[1] == -2 and flat[115] == -3
    flat[999] = 1.0
    assert halves.item() == 1.0
    alone[0] = 9
    assert twin[0] == 0


def test_overlapping_tensors_without_their_base_stay_aliases_and_aligned(memory):
    base = torch.arange(4000, dtype=torch.int16)
    first, second = base[1:9], base[4:12].view(torch.int64)
    far = base[3000:3004]
    pack([second, far, first], memory, "a")
    assert first.tolist() == list(range(1, 9)) and far.tolist() == [3000, 3001, 3002, 3003]
    second[0] = 0
    assert first.tolist() == [1, 2, 3, 0, 0, 0, 0, 8] and base[5] == 5
    assert first.data_ptr() % 2 == 0 and second.data_ptr() % 8 == 0


def test_pack_nothing(memory):
    assert pack([], memory, "a").numel() == 0
    assert memory.release("a") == 0 and memory.restore("a") == 0


def test_packing_into_a_released_tag_changes_no_tensor(memory):
    memory.allocate(8, "a")
    memory.release("a")
    tensor = torch.randn(5)
    pointer = tensor.data_ptr()
    with pytest.raises(RuntimeError, match="'a': it is released"):
        pack([tensor], memory, "a")
    assert tensor.data_ptr() == pointer


class FirstTouch:
    """The kernel gives its buffers their pages when they are written, and takes them back with the last tensor."""

    def allocate(self, nbytes, tag):
        return torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def peak() -> int:
    """The most that was resident since 5 was last written to /proc/self/clear_refs."""
    return int(re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def test_old_memory_is_freed_as_it_is_replaced():
    # With the old tensors freed one by one the peak is one tensor above the start; with all of them kept it were ten.
    tensors = [FirstTouch().allocate(10_000_000, "").fill_(1) for _ in range(10)]
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    assert before >= 100_000_000
    buffer = pack(tensors, FirstTouch(), "a")
    assert 5_000_000 < peak() - before < 25_000_000
    assert buffer.sum(dtype=torch.int64) == 100_000_000


def test_span_from_metadata_alone():
    memory = CpuMemory()
    tensors = [torch.randn(3, 5), torch.randn(7).bfloat16(), torch.empty(0)]
    buffer = pack(tensors, memory, "a")
    elsewhere, rows, tail, half = torch.randn(3), tensors[0][1:3], tensors[1][2:], buffer[256:512]
    column = tensors[0].t()
    memory.release("a")
    assert span(buffer, tensors[0]) == (0, 60)
    assert span(buffer, tensors[1]) == (256, 14)
    assert span(buffer, rows) == (20, 40)
    assert span(half, tail) == (4, 10)
    assert span(half, tensors[0]) is None
    assert span(buffer, elsewhere) is None
    assert span(buffer, buffer) == (0, 512)
    with pytest.raises(AssertionError, match="has no span"):
        span(buffer, column)


def test_small_blocks_go_back_to_the_system_too():
    """Of blocks like these the C library keeps the memory, behind one that is still in use."""
    memory, blocks = CpuMemory(), 400
    for _ in range(blocks):
        memory.allocate(100_000, "tag").fill_(1)
    behind = torch.ones(1000)
    before = resident()
    memory.release("tag")
    assert before - resident() > 0.9 * blocks * 100_000
    assert behind.sum() == 1000
