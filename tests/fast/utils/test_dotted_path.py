import pytest

from miles.utils.dotted_path import load_function

HERE = __name__


def takes_two(config, sample):
    return "two"


def takes_three(config, sample, more):
    return "three"


def has_a_default(config, sample, more=None):
    return "default"


async def waits(config, sample):
    return "async"


NO_FUNCTION = 3


@pytest.fixture
def here(monkeypatch, tmp_path):
    """The dotted path of this module's functions: pytest imports it under a name that can't be imported."""
    (tmp_path / "my_functions.py").write_text(
        "from sys import modules\nglobals().update(vars(modules['" + HERE + "']))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "my_functions"


@pytest.mark.parametrize("name", ["takes_two", "has_a_default"])
def test_loads(here, name):
    assert load_function("--flag", f"{here}.{name}", "config", "sample") is globals()[name]


async def test_loads_async(here):
    assert await load_function("--flag", f"{here}.waits", "config", "sample", is_async=True)(0, 0) == "async"


@pytest.mark.parametrize(
    "path, is_async, message",
    [
        ("no_such_package.f", False, "--flag no_such_package.f: can't be imported"),
        ("HERE.missing", False, "can't be imported"),
        ("function", False, "can't be imported.*give package.module.function"),
        ("HERE.NO_FUNCTION", False, "is of type int; it must be a function NO_FUNCTION\\(config, sample\\)"),
        ("HERE.takes_three", False, "takes \\(config, sample, more\\); it must take \\(config, sample\\)"),
        ("HERE.waits", False, "must not be an async function: def waits\\(config, sample\\)"),
        ("HERE.takes_two", True, "must be an async function: async def takes_two\\(config, sample\\)"),
    ],
)
def test_refusals(here, path, is_async, message):
    with pytest.raises(ValueError, match=message):
        load_function("--flag", path.replace("HERE", here), "config", "sample", is_async=is_async)
