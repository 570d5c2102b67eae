import gc
import mmap

import psutil
import pytest
import torch

from miles.residency import pinned
from miles.residency.host_store import HostStore
from miles.residency.memory import CpuMemory
from miles.residency.pinned import HostBuffer, free_host_bytes
from miles.residency.plan import Place
from miles.utils.host_memory import return_freed_memory


def resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[True, False], ids=["keep", "give back"])
def store(request):
    return HostStore(pinned=False, keep=request.param, remedy="do this")


def held_bytes(store: HostStore) -> int:
    return sum(len(buffer.tensor) for buffer in store._buffers.values())


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 1_000_003])
def test_round_trip(store, nbytes):
    source = random_bytes(nbytes)
    copy, target = source.clone(), torch.zeros_like(source)
    store.save("a", source)
    assert torch.equal(source, copy)
    source.zero_()
    store.load("a", target)
    assert torch.equal(target, copy) and held_bytes(store) == nbytes and store.place is Place.HOST
    assert torch.equal(store.read("a", nbytes // 3, nbytes // 2), copy[nbytes // 3 :][: nbytes // 2])


def test_nan_payloads_survive(store):
    bits = torch.tensor([0x7FC00001, 0x7F800002, -1, -(2**31)], dtype=torch.int32)
    source, target = bits.view(torch.float32), torch.zeros(4)
    store.save("a", source.view(torch.uint8))
    store.load("a", target.view(torch.uint8))
    assert torch.equal(target.view(torch.int32), bits)


def test_the_bytes_are_in_the_store_while_the_memory_is_away(store):
    return_freed_memory()  # what other tests have left; a release gives it back as well
    memory, before = CpuMemory(), resident()
    buffer = memory.allocate(100_000_000, "a")
    buffer.copy_(random_bytes(100_000_000))
    copy_of_some = buffer[5_000_000:5_000_100].clone()
    for _ in range(2):
        store.save("a", buffer)
        memory.release("a")
        assert 95e6 < resident() - before < 120e6  # once, not twice
        memory.restore("a")
        store.load("a", buffer)
        store.discard("a")
        kept = 100e6 if held_bytes(store) else 0
        assert 95e6 + kept < resident() - before < 120e6 + kept
    assert torch.equal(buffer[5_000_000:5_000_100], copy_of_some)


@pytest.mark.parametrize("keep", [True, False])
def test_what_discard_does(keep):
    store, source = HostStore(pinned=False, keep=keep, remedy="do this"), random_bytes(1000)
    store.discard("never saved")
    for _ in range(2):
        store.save("a", source)
        assert torch.equal(store.read("a", 0, 1000), source)
        store.discard("a")
        if keep:
            assert held_bytes(store) == 1000 and torch.equal(store.read("a", 0, 1000), source)
        else:
            assert held_bytes(store) == 0
            with pytest.raises(AssertionError, match="nothing is saved under 'a'"):
                store.read("a", 0, 1000)


def test_a_buffer_that_stays_is_reported_once_with_the_flag_that_gives_it_back(store, caplog):
    caplog.set_level("INFO", logger="miles.residency.host_store")
    for _ in range(3):
        store.save("weights.0", torch.zeros(20_000_000, dtype=torch.uint8))
        store.discard("weights.0")
    if not held_bytes(store):
        assert caplog.messages == []
        return
    (message,) = caplog.messages
    assert "0.02 GB of host memory for weights.0 stay" in message
    assert "--no-offload-train-keep-host-buffers" in message


def test_resident_memory_is_flat_over_cycles(store):
    sources = {"weights.0": random_bytes(10_000_000), "optimizer.0": random_bytes(20_000_000, seed=1)}
    levels = []
    for _ in range(6):
        for key, source in sources.items():
            store.save(key, source)
        for key, source in reversed(sources.items()):
            store.load(key, source)
            store.discard(key)
        levels.append(resident())
    assert max(levels[1:]) - min(levels[1:]) < 5e6


def test_a_view_outlives_its_buffer(store):
    source = random_bytes(100_000)
    store.save("a", source)
    view = store.read("a", 10, 50_000)
    store.save("a", random_bytes(10, seed=1))
    assert torch.equal(view, source[10:50_010])


def test_another_size_takes_the_old_one_s_place(store):
    store.save("a", random_bytes(1000))
    store.save("a", random_bytes(5000))
    assert held_bytes(store) == 5000
    with pytest.raises(AssertionError, match="a holds 5,000 bytes, the target 1,000"):
        store.load("a", torch.zeros(1000, dtype=torch.uint8))


def test_without_room_nothing_is_touched_and_the_error_helps(store, monkeypatch):
    source = random_bytes(10_000)
    copy = source.clone()
    monkeypatch.setattr(pinned, "free_host_bytes", lambda: 9_999)
    with pytest.raises(ValueError, match=r"10,000 bytes .* 9,999 are free: do this$"):
        store.save("a", source)
    assert torch.equal(source, copy) and held_bytes(store) == 0
    with pytest.raises(AssertionError, match="nothing is saved"):
        store.load("a", source)
    monkeypatch.undo()
    store.save("a", source)
    assert torch.equal(store.read("a", 0, 10_000), copy)


def test_a_save_that_fails_leaves_no_older_contents_behind(store, monkeypatch):
    store.save("a", random_bytes(1000))
    monkeypatch.setattr(pinned, "free_host_bytes", lambda: 9_999)
    with pytest.raises(ValueError, match="10,000 bytes"):
        store.save("a", random_bytes(10_000))
    with pytest.raises(AssertionError, match="nothing is saved under 'a'"):
        store.read("a", 0, 1000)


def test_memory_that_others_take_meanwhile_is_noticed(monkeypatch):
    free = iter([100 * mmap.PAGESIZE] + [50 * mmap.PAGESIZE] * 3 + [0] * 100)
    monkeypatch.setattr(pinned, "PREFAULT_PIECE", 20 * mmap.PAGESIZE)
    monkeypatch.setattr(pinned, "free_host_bytes", lambda: next(free))
    with pytest.raises(ValueError, match="409,600 bytes of host memory are needed and 0 are free"):
        HostBuffer(100 * mmap.PAGESIZE, pinned=False, remedy="x")


def test_more_than_the_address_space_is_an_error_that_helps(monkeypatch):
    monkeypatch.setattr(pinned, "free_host_bytes", lambda: 2**60)
    with pytest.raises(ValueError, match="Cannot allocate memory; do this"):
        HostBuffer(2**50, pinned=False, remedy="do this")


class FakeRuntime:
    class cudaError:
        success = 0

    def __init__(self, code):
        self.code = code
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, pointer, nbytes, flags):
        if self.code == 0:
            self.pinned[pointer] = nbytes
        return self.code

    def cudaHostUnregister(self, pointer):
        del self.pinned[pointer]


def test_pinned_exactly_and_unpinned_once(monkeypatch):
    runtime = FakeRuntime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    store = HostStore(pinned=True, keep=False, remedy="do this")
    store.save("a", random_bytes(100_001))
    store.save("empty", random_bytes(0))
    ((pointer, nbytes),) = runtime.pinned.items()
    assert nbytes == 100_001 and pointer % mmap.PAGESIZE == 0
    store.discard("a")
    assert runtime.pinned == {}
    store.save("b", random_bytes(5))
    store.save("b", random_bytes(6))
    assert list(runtime.pinned.values()) == [6]


def test_a_failure_to_pin_says_how_much_and_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeRuntime(2))
    store = HostStore(pinned=True, keep=True, remedy="do this")
    with pytest.raises(ValueError, match=r"pinning 123,456 bytes .*\(2\).*memlock.*or do this"):
        store.save("a", random_bytes(123_456))
    assert held_bytes(store) == 0


def fake_root(folder, cgroup: str, files: dict[str, str]):
    for name, text in {
        "proc/meminfo": "MemTotal: 900 kB\nMemAvailable: 500 kB\n",
        "proc/self/cgroup": cgroup,
        **files,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def group(folder, limit, used, cached, active=0):
    return {
        f"sys/fs/cgroup/{folder}memory.max": f"{limit}\n",
        f"sys/fs/cgroup/{folder}memory.current": f"{used}\n",
        f"sys/fs/cgroup/{folder}memory.stat": f"anon 5\ninactive_file {cached}\nactive_file {active}\n",
    }


@pytest.mark.parametrize(
    "cgroup, files, free",
    [
        ("0::/\n", {}, 512_000),
        ("0::/\n", group("", "max", 0, 0), 512_000),
        ("0::/\n", group("", 10_000, 4_000, 1_000), 7_000),
        ("0::/\n", group("", 10_000, 9_000, 1_000, active=6_000), 8_000),
        ("0::/of/the/host\n", group("", 10_000, 4_000, 1_000), 7_000),
        ("0::/a/b\n", {**group("a/", 3_000, 1_000, 0), **group("a/b/", "max", 0, 0)}, 2_000),
        ("0::/\n", group("", 10_000, 11_000, 0), 0),
        (
            "5:devices:/\n4:cpu,memory:/x\n",
            {
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "6000",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "5000",
                "sys/fs/cgroup/memory/x/memory.stat": "inactive_file 7\ntotal_inactive_file 500\n"
                "active_file 9\ntotal_active_file 2000\n",
            },
            3_500,
        ),
    ],
)
def test_free_host_bytes(tmp_path, cgroup, files, free):
    assert free_host_bytes(fake_root(tmp_path, cgroup, files)) == free


def test_free_host_bytes_of_this_machine():
    assert 0 < free_host_bytes() <= psutil.virtual_memory().total
