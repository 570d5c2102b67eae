"""The build backend that moves SGLang's dependencies into an extra."""

import importlib.util
import zipfile
from base64 import urlsafe_b64encode
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]


@pytest.fixture
def backend():
    spec = importlib.util.spec_from_file_location("sglang_backend", ROOT / "scripts/sglang_wheel/backend.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


METADATA = """Metadata-Version: 2.4
Name: sglang
Requires-Dist: torch==2.11.0
Requires-Dist: torchcodec==0.11.1; sys_platform != "linux" or python_version >= "3"
Requires-Dist: ray[default]>=2.55.1; extra == "ray"

Requires-Dist: a word of the description
"""


def test_dependencies_move_into_the_extra(backend):
    changed = backend.dependencies_to_extra(METADATA)
    header, description = changed.split("\n\n", 1)
    requirements = [
        Requirement(line.split(":", 1)[1].strip()) for line in header.split("\n") if line.startswith("Requires-Dist:")
    ]

    def needed(extra: str) -> set[str]:
        return {requirement.name for requirement in requirements if requirement.marker.evaluate({"extra": extra})}

    assert needed("") == set()
    assert needed("cuda") == {"torch", "torchcodec"}
    assert needed("ray") == {"ray"}
    assert "Provides-Extra: cuda" in header
    assert description == "Requires-Dist: a word of the description\n"


def test_copied_wheel_holds_the_same_files_and_a_true_record(backend, tmp_path):
    source, target = tmp_path / "sglang-1.0-py3-none-any.whl", tmp_path / "out.whl"
    with zipfile.ZipFile(source, "w") as wheel:
        wheel.writestr("sglang/__init__.py", "x = 1\n")
        wheel.writestr("sglang-1.0.dist-info/METADATA", METADATA)
        record = ["sglang/__init__.py,sha256=abc,6"]
        record += ["sglang-1.0.dist-info/METADATA,sha256=old,1", "sglang-1.0.dist-info/RECORD,,"]
        wheel.writestr("sglang-1.0.dist-info/RECORD", "\n".join(record) + "\n")
    backend._copy_wheel(source, target)
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target) as new:
        assert new.namelist() == old.namelist()
        assert new.read("sglang/__init__.py") == b"x = 1\n"
        metadata = new.read("sglang-1.0.dist-info/METADATA")
        digest = urlsafe_b64encode(sha256(metadata).digest()).rstrip(b"=").decode()
        lines = new.read("sglang-1.0.dist-info/RECORD").decode().splitlines()
    assert f"sglang-1.0.dist-info/METADATA,sha256={digest},{len(metadata)}" in lines
    assert len(lines) == 3


def test_the_installed_version_is_the_one_named(backend):
    assert f"sglang=={version('sglang')}" == backend.SGLANG
