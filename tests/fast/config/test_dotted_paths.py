"""Whether something is at a dotted path, told without importing it."""

import sys

import pytest

from miles.config.dotted_paths import dotted_path_problem

MODULE = """
import os, json as j
from collections import OrderedDict as Ordered
raise SystemExit("importing this would end the program")
a = b, (c, d) = 1, (2, 3)
e: int = 4
if a:
    def f(): inner = 1
else:
    class G:
        method = 1
try:
    from nowhere import h
except ImportError:
    h = None
with open("x") as k:
    pass
"""


@pytest.fixture
def there(tmp_path, monkeypatch):
    (tmp_path / "pack" / "sub").mkdir(parents=True)
    (tmp_path / "pack" / "__init__.py").write_text("first = 1\n")
    (tmp_path / "pack" / "sub" / "mod.py").write_text(MODULE)  # sub has no __init__.py
    (tmp_path / "star.py").write_text("from os.path import *\n")
    (tmp_path / "lazy.py").write_text("def __getattr__(name): return print\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    assert not {"pack", "star", "lazy", "broken"} & set(sys.modules)


@pytest.mark.parametrize("name", ["os", "j", "Ordered", "a", "b", "c", "d", "e", "f", "G", "h", "k"])
def test_what_a_module_binds_is_there(there, name):
    assert dotted_path_problem("--flag", f"pack.sub.mod.{name}", "m.f") is None


@pytest.mark.parametrize("path", ["pack.first", "star.join", "lazy.anything", "broken.f", "math.sqrt", "json.dumps"])
def test_where_a_file_does_not_tell_the_import_will(there, path):
    assert dotted_path_problem("--flag", path, "m.f") is None


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("pack", "must be the dotted path of a function, such as m.f"),
        ("pack/sub.py", "must be the dotted path of a function, such as m.f"),
        ("nowhere.f", "there is no module nowhere, neither beside train.py nor in a folder of PYTHONPATH"),
        ("pack.nowhere.f", "there is no module pack.nowhere, neither"),
        ("star.sub.f", "there is no module star.sub, neither"),
        ("pack.sub.mod.inner", "pack.sub.mod has no inner"),
        ("pack.sub.mod.method", "pack.sub.mod has no method"),
        ("pack.firts", "pack has no firts; did you mean first?"),
    ],
)
def test_what_is_not_there(there, path, problem):
    assert dotted_path_problem("--flag", path, "m.f").startswith(f"--flag {path}")
    assert problem in dotted_path_problem("--flag", path, "m.f")


def test_a_module_that_is_imported_already():
    assert dotted_path_problem("--flag", "json.dumps", "m.f") is None
    assert "json has no dump_s; did you mean" in dotted_path_problem("--flag", "json.dump_s", "m.f")
