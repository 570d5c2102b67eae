import pytest

from miles.utils.checkpoint_folder import MARKER, checkpoint_folder, find_checkpoint, write_marker


def test_the_marker_decides_and_a_step_overrides_it(tmp_path):
    for rollout_id in (1, 3, 5):
        checkpoint_folder(tmp_path, rollout_id).mkdir()
    assert checkpoint_folder(tmp_path, 12).name == "iter_0000012"
    # What a crash left behind is not loaded: no marker names it.
    assert find_checkpoint(tmp_path, None) is None
    write_marker(tmp_path, 3)
    assert find_checkpoint(tmp_path, None) == (3, tmp_path / "iter_0000003")
    assert find_checkpoint(str(tmp_path), 1) == (1, tmp_path / "iter_0000001")
    write_marker(tmp_path, 5)
    assert find_checkpoint(tmp_path, None) == (5, tmp_path / "iter_0000005")
    assert (tmp_path / MARKER).read_text() == "5\n"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [MARKER]


def test_nothing_saved_yet(tmp_path):
    assert find_checkpoint(tmp_path, None) is None
    assert find_checkpoint(tmp_path / "missing", None) is None


def test_a_missing_checkpoint_is_named_with_those_that_are_there(tmp_path):
    with pytest.raises(ValueError, match="no checkpoint iter_0000002 in .*there are: none"):
        find_checkpoint(tmp_path / "missing", 2)
    checkpoint_folder(tmp_path, 1).mkdir()
    checkpoint_folder(tmp_path, 4).mkdir()
    with pytest.raises(ValueError, match="no checkpoint iter_0000002 in .*there are: iter_0000001, iter_0000004"):
        find_checkpoint(tmp_path, 2)
    write_marker(tmp_path, 7)
    with pytest.raises(ValueError, match="no checkpoint iter_0000007"):
        find_checkpoint(tmp_path, None)


@pytest.mark.parametrize("text", ["", "release", "-1", "3.0"])
def test_a_broken_marker_is_refused(tmp_path, text):
    (tmp_path / MARKER).write_text(text)
    with pytest.raises(ValueError, match=f"{MARKER} holds .*expected the number of a rollout"):
        find_checkpoint(tmp_path, None)


def test_an_interrupted_marker_leaves_the_old_one(tmp_path):
    checkpoint_folder(tmp_path, 3).mkdir()
    write_marker(tmp_path, 3)
    (tmp_path / f"{MARKER}.new").write_text("")  # killed before the rename
    assert find_checkpoint(tmp_path, None)[0] == 3
    write_marker(tmp_path, 4)
    assert (tmp_path / MARKER).read_text() == "4\n"
