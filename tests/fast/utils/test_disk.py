import errno
import os
import re
import shutil

import pytest

from miles.utils import disk
from miles.utils.disk import writing
from miles.utils.errors import UserError


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a/b"),
        PermissionError(errno.EROFS, os.strerror(errno.EROFS), "a/b"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_failure_of_the_system_names_the_folder_and_its_room(tmp_path, error):
    free = shutil.disk_usage(tmp_path)
    folder = tmp_path / "missing" / "a"
    with pytest.raises(UserError, match=re.escape(str(error))) as caught, writing("--save", folder):
        raise error
    sentence = str(caught.value)
    assert sentence.startswith(f"writing to --save {folder} failed ({type(error).__name__}: ")
    (said,) = re.findall(r"; ([\d,]+) bytes are free there", sentence)
    assert 0 <= int(said.replace(",", "")) <= free.total


def test_what_a_full_disk_breaks_is_not_taken_for_a_fault_of_the_program(tmp_path, monkeypatch):
    """torch says `unexpected pos 576 vs 534`, and nothing of the disk."""
    with pytest.raises(RuntimeError, match="^pos$"), writing("--save", tmp_path):
        raise RuntimeError("pos")
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 4096)
    with pytest.raises(UserError, match=r"\(RuntimeError: pos\); 4,096 bytes are free there: make room"):
        with writing("--save", tmp_path):
            raise RuntimeError("pos")
    with pytest.raises(UserError, match="^said$"), writing("--save", tmp_path):
        raise UserError("said")
