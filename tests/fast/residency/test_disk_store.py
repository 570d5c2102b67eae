import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from miles.residency import disk_store as module
from miles.residency import pinned
from miles.residency.disk_store import DiskStore
from miles.residency.filesystem import filesystem_of
from miles.residency.plan import Place

ROOT = Path(__file__).parents[3]
CHUNK = 4 * 4 * 4096  # four slots of four blocks: many pieces even of small tensors


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["direct", "buffered"])
def store(request, tmp_path, monkeypatch):
    if request.param == "buffered":
        monkeypatch.setattr(module, "bypass_cache", lambda descriptor, block: False)
    return DiskStore(str(tmp_path / "made" / "here"), CHUNK, pinned=False, name="actor.0")


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 4 * 4096, CHUNK, 1_000_003])
def test_round_trip(store, nbytes):
    source = random_bytes(nbytes)
    copy, target = source.clone(), torch.zeros_like(source)
    store.save("a", source)
    assert torch.equal(source, copy)
    store.load("a", target)
    assert torch.equal(target, copy) and store.place is Place.DISK


@pytest.mark.parametrize("offset, nbytes", [(0, 0), (0, 1), (4096, 4096), (4095, 2), (1, 99_998), (99_999, 1)])
def test_read_any_range(store, offset, nbytes):
    source = random_bytes(100_000)
    store.save("a", source)
    part = store.read("a", offset, nbytes)
    assert torch.equal(part, source[offset : offset + nbytes])


def test_nan_payloads_survive(store):
    bits = torch.tensor([0x7FC00001, 0x7F800002, -1, -(2**31)], dtype=torch.int32)
    target = torch.zeros(4)
    store.save("a", bits.view(torch.uint8))
    store.load("a", target.view(torch.uint8))
    assert torch.equal(target.view(torch.int32), bits)


def test_overwritten_in_place_and_kept_after_discard(store):
    store.save("a", random_bytes(100_000))
    place = os.fstat(store._files["a"].file.fileno()).st_ino
    second = random_bytes(100_000, seed=1)
    store.save("a", second)
    store.discard("a")
    assert os.fstat(store._files["a"].file.fileno()).st_ino == place
    assert torch.equal(store.read("a", 0, 100_000), second)


def test_sizes_may_change(store):
    for nbytes in (1000, 200_000, 5_000):
        source = random_bytes(nbytes)
        store.save("a", source)
        assert torch.equal(store.read("a", 0, nbytes), source)
    with pytest.raises(AssertionError, match="a holds 5,000 bytes, the target 1"):
        store.load("a", torch.zeros(1, dtype=torch.uint8))


def test_what_was_not_saved_can_t_be_read(store):
    with pytest.raises(AssertionError, match="nothing is saved under 'a'"):
        store.load("a", torch.zeros(1, dtype=torch.uint8))


def test_this_filesystem_is_used_directly(tmp_path):
    if filesystem_of(tmp_path) not in ("ext4", "xfs"):
        pytest.skip("neither ext4 nor xfs")
    store = DiskStore(str(tmp_path), CHUNK, pinned=False, name="actor.0")
    store.save("a", random_bytes(10_000))
    assert store._files["a"].direct


def test_two_stores_in_one_folder_don_t_collide(tmp_path):
    stores = [DiskStore(str(tmp_path), CHUNK, pinned=False, name="actor.0") for _ in range(2)]
    sources = [random_bytes(100_000, seed) for seed in range(2)]
    for store, source in zip(stores, sources, strict=True):
        store.save("weights.0", source)
    for store, source in zip(stores, sources, strict=True):
        assert torch.equal(store.read("weights.0", 0, 100_000), source)
        assert os.listdir(tmp_path) == []


SLEEPER = """
import os, signal, sys, torch
from miles.residency.disk_store import DiskStore
store = DiskStore(sys.argv[1], 2**20, pinned=False, name="actor.0")
store.save("a", torch.ones(20_000_000, dtype=torch.uint8))
file = os.fstat(store._files["a"].file.fileno())
print(file.st_nlink, file.st_blocks * 512, flush=True)
signal.pause()
"""


@pytest.mark.real
def test_a_killed_process_leaves_nothing(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    links, taken = map(int, process.stdout.readline().split())
    assert taken >= 20_000_000  # really on the disk, and
    assert links == 0 and os.listdir(tmp_path) == []  # without a name: the kernel frees it with its last descriptor
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=20) == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


def test_memory_is_refused_and_nothing_is_made_there():
    folder = Path(f"/dev/shm/miles_test_{os.getpid()}/offload")
    with pytest.raises(ValueError, match=rf"{folder}, is in memory \(tmpfs\).*--offload-train-disk-dir"):
        DiskStore(str(folder), CHUNK, pinned=False, name="actor.0")
    assert not folder.parent.exists()


def test_a_chunk_that_does_not_fit_the_host_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(pinned, "free_host_bytes", lambda: CHUNK - 1)
    with pytest.raises(ValueError, match="65,536 bytes of host memory .* 65,535 .*--offload-train-disk-chunk-mb"):
        DiskStore(str(tmp_path), CHUNK, pinned=False, name="actor.0")


def test_a_folder_that_can_t_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file/folder, can't be made \(Not a directory\).*--offload-train-disk-dir"):
        DiskStore(str(tmp_path / "file" / "folder"), CHUNK, pinned=False, name="actor.0")


def test_a_full_disk_is_found_before_anything_is_written(tmp_path, monkeypatch):
    store = DiskStore(str(tmp_path), CHUNK, pinned=False, name="critic.3")
    source = random_bytes(1_000_000)
    copy = source.clone()

    def full(descriptor, offset, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError) as caught:
        store.save("a", source)
    text = str(caught.value)
    assert all(part in text for part in ("critic.3", str(tmp_path), "1,003,520 bytes", "No space left", "bytes free"))
    assert "--offload-train-disk-dir" in text and "--offload-train-target cpu" in text
    assert "--rematerialize" not in text  # it is refused with the disk as target
    assert torch.equal(source, copy)
    monkeypatch.undo()
    store.save("a", source)
    assert torch.equal(store.read("a", 0, 1_000_000), copy)


def test_a_disk_that_is_too_small_is_not_filled_to_find_it_out(tmp_path, monkeypatch):
    store = DiskStore(str(tmp_path), CHUNK, pinned=False, name="actor.0")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1_003_519))
    monkeypatch.setattr(os, "posix_fallocate", lambda *arguments: pytest.fail("it took all there is"))
    with pytest.raises(ValueError, match=r"actor.0: 1,003,520 bytes for a .*\(No space left.* 1,003,519 bytes free"):
        store.save("a", random_bytes(1_000_000))


def test_the_kernel_s_own_limit_is_found_before_anything_is_written(tmp_path):
    store = DiskStore(str(tmp_path), CHUNK, pinned=False, name="actor.0")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))
    try:
        store.save("small", random_bytes(400_000))
        with pytest.raises(ValueError, match="1,003,520 bytes for a can't be set aside.*File too large"):
            store.save("a", random_bytes(1_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert torch.equal(store.read("small", 0, 400_000), random_bytes(400_000))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_write_that_fails_midway_leaves_the_source_and_the_next_save_works(store, monkeypatch, code):
    source, other = random_bytes(1_000_000), random_bytes(50_000, seed=1)
    copy = source.clone()
    store.save("a", source)
    store.save("other", other)
    lock, count, write = threading.Lock(), 0, os.pwrite

    def fails_once(descriptor, data, offset):
        nonlocal count
        with lock:
            count += 1
            fails, after = count == 10, count > 10
        if fails:
            raise OSError(code, os.strerror(code))
        if after:
            time.sleep(0.05)  # the failure is heard meanwhile, on a busy machine too
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", fails_once)
    with pytest.raises(OSError, match=rf"actor.0: writing 1,000,000 bytes of a in {store._folder} failed") as caught:
        store.save("a", source)
    assert caught.value.errno == code and "bytes are free there" in str(caught.value)
    assert count < 30  # the others stopped too
    assert torch.equal(source, copy) and torch.equal(store.read("other", 0, 50_000), other)
    with pytest.raises(AssertionError, match="nothing is saved under 'a'"):
        store.read("a", 0, 1)
    store.save("a", source)
    assert torch.equal(store.read("a", 0, 1_000_000), copy)


def test_a_read_that_fails_midway_can_be_tried_again(store, monkeypatch):
    source, target = random_bytes(1_000_000), torch.zeros(1_000_000, dtype=torch.uint8)
    store.save("a", source)

    def broken(descriptor, buffers, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(OSError, match="reading 1,000,000 bytes of a .* failed .Input/output error"):
        store.load("a", target)
    monkeypatch.undo()
    store.load("a", target)
    assert torch.equal(target, source)


def test_short_transfers_are_continued(store, monkeypatch):
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: write(descriptor, data[:8192], offset))
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, offset: read(descriptor, [buffers[0][:4096]], offset))
    source, target = random_bytes(300_001), torch.zeros(300_001, dtype=torch.uint8)
    store.save("a", source)
    store.load("a", target)
    assert torch.equal(target, source)


def test_a_file_that_lost_its_end_is_an_error(store):
    store.save("a", random_bytes(100_000))
    os.ftruncate(store._files["a"].file.fileno(), 50_000)
    with pytest.raises(OSError, match="reading 100,000 bytes of a .*transferred nothing"):
        store.load("a", torch.zeros(100_000, dtype=torch.uint8))


def test_a_filesystem_without_direct_io_falls_back(tmp_path, monkeypatch):
    write, refused = os.pwrite, []

    def no_direct(descriptor, data, offset):
        if module.fcntl.fcntl(descriptor, module.fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(offset)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", no_direct)
    store = DiskStore(str(tmp_path), CHUNK, pinned=False, name="actor.0")
    source = random_bytes(100_001)
    store.save("a", source)
    assert refused == [0] and not store._files["a"].direct
    assert torch.equal(store.read("a", 0, 100_001), source)


def test_resident_memory_is_flat_over_cycles(tmp_path):
    store = DiskStore(str(tmp_path), 2**22, pinned=False, name="actor.0")
    source, levels = random_bytes(40_000_000), []
    for _ in range(5):
        store.save("a", source)
        store.load("a", source)
        store.read("a", 123, 36_000_000)  # malloc keeps what is freed below 32 MiB
        gc.collect()
        levels.append(psutil.Process().memory_info().rss)
    assert max(levels[1:]) - min(levels[1:]) < 8e6
