"""Dotted paths of functions: how they are written, and whether something is there, without importing it."""

import ast
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

from miles.config.names import nearest


def dotted_path_problem(flag: str, path: str, example: str) -> str | None:
    """What is wrong with the dotted path of a function, in one sentence; None if nothing is.

    Its module is found and read, not run: what it does as it is imported is seen where it is loaded, before an engine
    starts.

    Args:
        flag: what names it.
        path: package.module.function.
        example: a right one.
    """
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return f"{flag} {path} must be the dotted path of a function, such as {example}"
    *modules, name = parts
    imported = sys.modules.get(".".join(modules))
    if imported is not None:
        known = [] if hasattr(imported, name) else sorted(vars(imported))
        return f"{flag} {path}: {'.'.join(modules)} has no {name}{nearest(name, known)}" if known else None
    folders: list[str] | None = None
    for count in range(1, len(modules) + 1):
        module = ".".join(modules[:count])
        spec = _spec_of(module, folders)
        if spec is None:
            return f"{flag} {path}: there is no module {module}, neither beside train.py nor in a folder of PYTHONPATH"
        folders = list(spec.submodule_search_locations or ())
    names = _names(spec)
    if names is None or name in names:
        return None
    return f"{flag} {path}: {'.'.join(modules)} has no {name}{nearest(name, sorted(names))}"


def _spec_of(module: str, folders: list[str] | None) -> ModuleSpec | None:
    """Where a module would be imported from; `folders` are those of its package, None if it is in none."""
    if folders is not None and (places := _without_init(module.rpartition(".")[2], folders)):
        # Python's own search would ask the package above for its places, which is not imported.
        spec = ModuleSpec(module, None, is_package=True)
        spec.submodule_search_locations = places
        return spec
    specs = (finder.find_spec(module, folders) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)


def _without_init(name: str, folders: list[str]) -> list[str]:
    """The folders of a package without `__init__.py`; none where a module or another package has its name."""
    places = [place for folder in folders if (place := Path(folder, name)).is_dir()]
    modules = [Path(folder, f"{name}.py") for folder in folders] + [place / "__init__.py" for place in places]
    return [] if any(module.exists() for module in modules) else [str(place) for place in places]


def _names(spec: ModuleSpec | None) -> set[str] | None:
    """What a module of Python has at its top level; None where that can't be read off its file."""
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None  # the import says why
    names = set(_bound(tree))
    return None if names & {"*", "__getattr__"} else names


def _bound(node: ast.AST) -> Iterator[str]:
    """Names that the statements of a module bind, also within `if`, `try` and `with`."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from (alias.asname or alias.name.split(".")[0] for alias in aliases)
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Lambda():
                continue
            case _:
                yield from _bound(child)
