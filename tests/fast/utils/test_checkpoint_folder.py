"""Which checkpoint is loaded, whatever a killed run or a lost file has left."""

import logging
import shutil
from pathlib import Path

import pytest

from miles.utils.checkpoint_folder import (
    MANIFEST,
    MARKER,
    begin_checkpoint,
    checkpoint_folder,
    find_checkpoint,
    finish_checkpoint,
)
from tests.fast.fake_checkpoint import save_fake, write_model, write_parts


def test_the_marker_decides_and_a_step_overrides_it(tmp_path):
    assert find_checkpoint(tmp_path, None) is None
    assert find_checkpoint(tmp_path / "missing", None) is None
    save_fake(tmp_path, 1, 3)
    assert find_checkpoint(str(tmp_path), None) == (3, tmp_path / "iter_0000003")
    assert find_checkpoint(tmp_path, 1) == (1, tmp_path / "iter_0000001")
    assert (tmp_path / MARKER).read_text() == "3\n"
    # What a killed run leaves is not taken, whole or not: the marker names what came before.
    write_parts(begin_checkpoint(tmp_path, 5))
    checkpoint_folder(tmp_path, 7).mkdir()
    assert find_checkpoint(tmp_path, None)[0] == 3
    finish_checkpoint(tmp_path, 5)
    assert find_checkpoint(tmp_path, None) == (5, tmp_path / "iter_0000005")
    assert not list(tmp_path.glob(".*"))


def test_a_missing_checkpoint_is_named_with_those_that_are_there(tmp_path):
    with pytest.raises(ValueError, match=r"no checkpoint iter_0000002 in .*of these rollouts: none"):
        find_checkpoint(tmp_path / "missing", 2)
    save_fake(tmp_path, 1, 4, 6)
    (tmp_path / "iter_0000006" / "samples.json").unlink()
    with pytest.raises(ValueError, match="no checkpoint iter_0000002 in .*of these rollouts: 1, 4$"):
        find_checkpoint(tmp_path, 2)
    with pytest.raises(ValueError, match="iter_0000006 is not whole: samples.json is missing; .*: 1, 4$"):
        find_checkpoint(tmp_path, 6)


def spoil_shard(folder):
    (folder / "model" / "__1_0.distcp").unlink()


def spoil_all(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def spoil_index(folder):
    (folder / "model" / ".metadata").unlink()


def cut_index(folder):
    path = folder / "model" / ".metadata"
    path.write_bytes(path.read_bytes()[:-1])


def spoil_random_state(folder):
    shutil.rmtree(folder / "rng")


def spoil_one_random_state(folder):
    (folder / "rng" / "rank_00000_of_00002.pt").unlink()


def spoil_position(folder):
    (folder / "data_source.json").unlink()


def spoil_reference(folder):
    (folder / "reference" / "__0_0.distcp").unlink()


SPOILT = {
    spoil_shard: "model/__1_0.distcp is missing",
    spoil_all: "model/.* is missing",
    spoil_index: "model/.metadata is missing",
    cut_index: r"model/.metadata (has \d+ bytes of \d+|is cut off)",
    spoil_random_state: "rng/rank_00000.* is missing",
    spoil_one_random_state: "rng/rank_00000_of_00002.pt is missing",
    spoil_position: "data_source.json is missing",
    spoil_reference: "reference/__0_0.distcp is missing",
}


@pytest.mark.parametrize("spoil", SPOILT)
@pytest.mark.parametrize("older", [False, True])
def test_the_last_whole_one_is_found_and_what_the_newer_lacks_is_said(tmp_path, caplog, spoil, older):
    """Also among checkpoints that have no list of their files, as far as what is there tells."""
    for rollout_id in (1, 3, 5):
        folder = begin_checkpoint(tmp_path, rollout_id)
        write_parts(folder)
        write_model(folder / "reference")
        finish_checkpoint(tmp_path, rollout_id)
        if older:
            (tmp_path / f"iter_000000{rollout_id}" / MANIFEST).unlink()
    assert find_checkpoint(tmp_path, None)[0] == 5
    spoil(tmp_path / "iter_0000005")
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint(tmp_path, None) == (3, tmp_path / "iter_0000003")
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"the checkpoint {tmp_path}/iter_0000005 is not whole: ") and "iter_0000003" in message
    with pytest.raises(ValueError, match=f"iter_0000005 is not whole: {SPOILT[spoil]}"):
        find_checkpoint(tmp_path, 5)
    for rollout_id in (1, 3):
        (tmp_path / f"iter_000000{rollout_id}" / "model" / ".metadata").unlink()
    with pytest.raises(ValueError, match="none in .* is whole"):
        find_checkpoint(tmp_path, None)


def test_a_whole_reference_that_is_gone_is_missed(tmp_path):
    folder = begin_checkpoint(tmp_path, 1)
    write_parts(folder)
    write_model(folder / "reference")
    finish_checkpoint(tmp_path, 1)
    shutil.rmtree(tmp_path / "iter_0000001" / "reference")
    with pytest.raises(ValueError, match="reference/.metadata is missing"):
        find_checkpoint(tmp_path, None)


def test_a_critic_is_taken_from_the_same_rollout(tmp_path):
    actor, critic = tmp_path / "actor", tmp_path / "critic"
    save_fake(actor, 1, 3)
    save_fake(critic, 1, 3, 5, rollout=False)  # killed before the actor's counted
    assert find_checkpoint(actor, None, critic) == (3, actor / "iter_0000003")
    spoil_shard(critic / "iter_0000003")
    assert find_checkpoint(actor, None, critic) == (1, actor / "iter_0000001")
    with pytest.raises(ValueError, match="critic/iter_0000003 is not whole: model/__1_0.distcp is missing"):
        find_checkpoint(actor, 3, critic)


class Killed(BaseException):
    pass


def test_a_kill_at_any_moment_leaves_a_whole_one_under_the_marker(tmp_path, monkeypatch):
    """Rollout 3 is saved, and again by a run that goes on from 1: killed before each change that it makes on disk."""
    changes = {"rename": Path.rename, "replace": Path.replace, "mkdir": Path.mkdir, "rmtree": shutil.rmtree}
    left = None

    def counted(change):
        def change_or_die(*args, **kwargs):
            nonlocal left
            if left == 0:
                raise Killed
            left = None if left is None else left - 1
            return change(*args, **kwargs)

        return change_or_die

    for name, change in changes.items():
        monkeypatch.setattr(shutil if name == "rmtree" else Path, name, counted(change))
    kills = 0
    while True:
        root = tmp_path / f"{kills}"
        root.mkdir()
        save_fake(root, 1, 3)
        (root / "iter_0000003" / "samples.json").write_text('"one"')
        (root / "iter_0000003" / MANIFEST).unlink()
        left = kills
        try:
            write_parts(begin_checkpoint(root, 3))
            finish_checkpoint(root, 3)
        except Killed:
            left = None
            assert find_checkpoint(root, None)[0] == 3, kills
            # The next attempt goes through, and leaves nothing else behind.
            write_parts(begin_checkpoint(root, 3))
            assert find_checkpoint(root, None)[0] == 3, kills
            finish_checkpoint(root, 3)
        finished, left = left is not None, None
        assert find_checkpoint(root, None) == (3, root / "iter_0000003")
        assert (root / "iter_0000003" / "samples.json").read_text() == "{}"
        assert sorted(path.name for path in root.iterdir()) == ["iter_0000001", "iter_0000003", MARKER]
        if finished:
            break
        kills += 1
    assert kills > 8


def test_what_the_driver_does_not_see_is_not_declared_whole(tmp_path):
    write_parts(begin_checkpoint(tmp_path, 1))
    (tmp_path / ".iter_0000001.partial" / "rng" / "rank_00001_of_00002.pt").unlink()
    with pytest.raises(ValueError, match="rng/rank_00001_of_00002.pt is missing; --save must be one folder"):
        finish_checkpoint(tmp_path, 1)
    assert not (tmp_path / MARKER).exists()


@pytest.mark.parametrize("text", ["", "release", "-1", "3.0"])
def test_a_broken_marker_is_refused(tmp_path, text):
    (tmp_path / MARKER).write_text(text)
    with pytest.raises(ValueError, match=f"{MARKER} holds .*expected the number of a rollout"):
        find_checkpoint(tmp_path, None)
