from abc import ABC, abstractmethod

import pytest

from miles.utils.dotted_path import load_class, load_function, load_object

HERE = __name__


def takes_two(config, sample):
    return "two"


def takes_three(config, sample, more):
    return "three"


def has_a_default(config, sample, more=None):
    return "default"


def by_keyword(config, sample, *, evaluation=False):
    return "keyword"


async def waits(config, sample):
    return "async"


def gives_waits(config, sample):
    """As a decorator makes of an async function."""
    return waits(config, sample)


class Source(ABC):
    def __init__(self, config):
        self.config = config

    @abstractmethod
    def get(self): ...

    @property
    @abstractmethod
    def size(self): ...


class Good(Source):
    size = 1

    def get(self): ...


class GetsOnly(Source):
    def get(self): ...


class TakesMore(Good):
    def __init__(self, config, more): ...


class Other:
    def get(self): ...


NO_FUNCTION = 3


@pytest.fixture
def here(monkeypatch, tmp_path):
    """The dotted path of this module's functions: pytest imports it under a name that can't be imported."""
    (tmp_path / "my_functions.py").write_text(
        "from sys import modules\nglobals().update(vars(modules['" + HERE + "']))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "my_functions"


@pytest.mark.parametrize(
    "name, result", [("takes_two", "two"), ("has_a_default", "default"), ("by_keyword", "keyword")]
)
def test_loads(here, name, result):
    assert load_function("--flag", f"{here}.{name}", "config", "sample")(0, 0) == result


async def test_loads_async(here):
    assert await load_function("--flag", f"{here}.waits", "config", "sample", is_async=True)(0, 0) == "async"


@pytest.mark.parametrize("name, result", [("takes_two", "two"), ("waits", "async"), ("gives_waits", "async")])
async def test_loads_either(here, name, result):
    assert await load_function("--flag", f"{here}.{name}", "config", "sample", is_async=None)(0, 0) == result


def test_a_function_without_a_signature_is_refused():
    with pytest.raises(ValueError, match="^--flag builtins.max: no signature found"):
        load_function("--flag", "builtins.max", "config", "sample")


def test_loads_what_is_called_with_a_keyword(here):
    function = load_function("--flag", f"{here}.by_keyword", "config", "sample", "evaluation=")
    assert function(0, 0, evaluation=True) == "keyword"
    with pytest.raises(ValueError, match="must take \\(config, sample, evaluation=\\)"):
        load_function("--flag", f"{here}.takes_two", "config", "sample", "evaluation=")


@pytest.mark.parametrize(
    "path, is_async, message",
    [
        ("no_such_package.f", False, "--flag no_such_package.f: can't be imported"),
        ("HERE.missing", False, "can't be imported"),
        ("function", False, "can't be imported.*give package.module.name"),
        ("HERE.NO_FUNCTION", False, "is of type int; it must be a function NO_FUNCTION\\(config, sample\\)"),
        ("HERE.Other", False, "is a class; it must be a function Other\\(config, sample\\)"),
        ("HERE.takes_three", False, "takes \\(config, sample, more\\); it must take \\(config, sample\\)"),
        ("HERE.takes_three", None, "takes \\(config, sample, more\\); it must take \\(config, sample\\)"),
        ("HERE.waits", False, "must not be an async function: def waits\\(config, sample\\)"),
        ("HERE.takes_two", True, "must be an async function: async def takes_two\\(config, sample\\)"),
    ],
)
def test_refusals(here, path, is_async, message):
    with pytest.raises(ValueError, match=message):
        load_function("--flag", path.replace("HERE", here), "config", "sample", is_async=is_async)


def test_loads_a_class(here):
    assert load_class("--flag", f"{here}.Good", Source, "config") is Good


@pytest.mark.parametrize(
    "name, message",
    [
        ("missing", "--flag my_functions.missing: can't be imported"),
        ("takes_two", "is of type function; it must be a class derived from .*test_dotted_path.Source"),
        ("Other", "is another class; it must be a class derived from .*Source"),
        ("GetsOnly", "lacks what it must have: size"),
        ("TakesMore", "takes \\(config, more\\); it must take \\(config\\)"),
    ],
)
def test_refused_classes(here, name, message):
    with pytest.raises(ValueError, match=message):
        load_class("--flag", f"{here}.{name}", Source, "config")


def test_loads_an_object(here):
    assert load_object("--flag", f"{here}.NO_FUNCTION") == 3


def test_what_a_module_itself_can_not_import_is_named(monkeypatch, tmp_path):
    (tmp_path / "needs_more.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="--flag needs_more.f: can't be imported \\(No module named 'no_such_package'"):
        load_object("--flag", "needs_more.f")
