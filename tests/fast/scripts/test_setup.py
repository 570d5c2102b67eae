"""What scripts/setup.sh says when something is missing; each case runs it in a copy of the few files that it reads."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[3]


@pytest.fixture
def checkout(tmp_path) -> Path:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/setup.sh", tmp_path / "scripts")
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    return tmp_path


def run_setup(checkout: Path, environment: dict[str, str]) -> subprocess.CompletedProcess:
    base = {"PATH": "/usr/bin:/bin", "HOME": str(checkout)}
    command = ["bash", str(checkout / "scripts/setup.sh")]
    return subprocess.run(command, env=base | environment, capture_output=True, text=True, timeout=300)


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_python_of_another_version_is_refused_by_name(checkout):
    other = write_program(checkout / "bin/python3", "exit 1")
    result = run_setup(checkout, {"PYTHON": str(other)})
    assert result.returncode != 0
    assert result.stderr.strip() == f"setup: PYTHON={other} is not a working Python 3.12."


def test_no_python_312_is_said_even_where_broken_shims_exist(checkout):
    for name in ("python3.12", "python3", "python"):
        write_program(checkout / "shims" / name, "echo 'pyenv: command not found' >&2; exit 127")
    result = run_setup(checkout, {"PATH": f"{checkout}/shims:/usr/bin:/bin"})
    assert result.returncode != 0
    assert "no Python 3.12 found" in result.stderr
    assert "pyenv install 3.12" in result.stderr


def test_python_312_of_pyenv_is_found_and_a_full_disk_is_said(checkout):
    pyenv = checkout / ".pyenv/versions/3.12.1/bin/python3.12"
    write_program(pyenv, f'exec {sys.executable} "$@"')
    for name in ("python3.12", "python3", "python"):
        write_program(checkout / "shims" / name, "exit 127")
    write_program(checkout / "shims/df", "echo Filesystem; echo /dev/vda 9 9 2000000 9% /")
    result = run_setup(checkout, {"PATH": f"{checkout}/shims:/usr/bin:/bin"})
    assert result.returncode != 0
    assert "making .venv with Python 3.12" in result.stdout
    assert "not enough disk: 2000 MB are free" in result.stderr


def test_an_unreachable_index_is_said(checkout):
    environment = {"PYTHON": sys.executable, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0"}
    result = run_setup(checkout, environment | {"PIP_CONFIG_FILE": "/dev/null"})
    assert result.returncode != 0
    assert "no network: the package index could not be reached" in result.stderr
    assert not (checkout / ".venv/.unfinished").exists()
