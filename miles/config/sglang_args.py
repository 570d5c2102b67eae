"""`--sglang-NAME`: arguments of the SGLang server, checked against the installed version.

The names and types are read from the source of SGLang's ServerArgs: importing it takes many seconds and loads torch.
"""

import ast
import functools
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError

from miles.config.names import nearest
from miles.config.paths import absolute
from miles.utils.errors import UserError

SET_BY_MILES = {
    "model_path": "Miles passes --hf-checkpoint",
    "device": "it is --device",
    "random_seed": "Miles derives it from --seed and the engine's number",
    "host": "Miles binds engines to a loopback or cluster address itself",
    "port": "Miles takes a free port",
    "nccl_port": "Miles takes a free port",
    "base_gpu_id": "Miles places engines on the GPUs that Ray gave it",
    "gpu_id_step": "Miles places engines on the GPUs that Ray gave it",
    "nnodes": "an engine lives on one node",
    "node_rank": "an engine lives on one node",
    "dist_init_addr": "Miles takes a free port",
    "enable_memory_saver": "it follows from --offload-rollout",
    "skip_server_warmup": "Miles waits for the engine's health itself",
    "weight_version": "Miles counts the weight syncs",
}
# Names that hold a path, a model of the hub or one of SGLang's own: what is there is meant as a path.
_PATH_ENDINGS = ("_path", "_dir", "_file", "_folder", "_template", "_keyfile", "_certfile")
_SCALARS = {"bool": bool, "int": int, "float": float, "str": str}
_LISTS = {f"List[{name}]": list[kind] for name, kind in _SCALARS.items()}  # type: ignore[valid-type]


@dataclass(frozen=True)
class ServerArgument:
    """One argument of the server, under one of its flags' names.

    Args:
        name: of its flag.
        kind: its Python type.
        choices: the allowed values, if they are listed.
        is_older: whether it stands under a name that SGLang used to have for it.
    """

    name: str
    kind: Any
    choices: tuple[Any, ...] | None
    is_older: bool = False


class SglangArguments(NamedTuple):
    """What was given for the server.

    Args:
        values: by the argument's name, of the types that SGLang declares.
        origins: by the argument's name, where it came from.
        older: flags that were written with a name that SGLang used to have, with the one it has.
        problems: what is wrong, in sentences.
    """

    values: dict[str, Any]
    origins: dict[str, str]
    older: list[str]
    problems: list[str]


def check_sglang(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> SglangArguments:
    """Server arguments with the types that SGLang declares, where each came from, and what is wrong with them.

    `layers` are pairs of an origin and what it gives, weakest first: names with underscores and, for each, a list of
    texts or a bool (command line) or any value (YAML). The result has one key an argument: its flag is `--` and the key
    with dashes.
    """
    given = SglangArguments({}, {}, [], [])
    values, origins, older, problems = given
    if not any(raw for _, raw in layers):
        return given
    try:
        known = server_arguments()
    except UserError as error:
        problems.append(str(error))
        return given
    for origin, raw in layers:
        for written, value in raw.items():
            flag = _flag(written)
            where = flag if origin == "command line" else f"{origin}: sglang_{written}"
            if written not in known:
                problems.append(f"{where} is unknown to the installed SGLang{nearest(flag, map(_flag, known))}")
                continue
            argument = known[written]
            if argument.name in SET_BY_MILES:
                problems.append(f"{where} cannot be given: {SET_BY_MILES[argument.name]}")
            elif origins.get(argument.name) == origin:
                problems.append(f"{where} and {_flag(argument.name)} are one argument; keep one")
            else:
                origins[argument.name] = origin
                if argument.is_older:
                    older.append(f"{where} ({_flag(argument.name)})")
                try:
                    values[argument.name] = _convert(argument, value)
                except UserError as error:
                    problems.append(f"{where} {error}")
    return given


def _flag(name: str) -> str:
    return f"--sglang-{name.replace('_', '-')}"


def _convert(argument: ServerArgument, value: Any) -> Any:
    if isinstance(value, list) and argument.kind not in _LISTS.values():
        given = " ".join(map(str, value))
        if argument.kind is bool:
            raise UserError(f"takes no value, got {given}; --no-{_flag(argument.name)[2:]} turns it off")
        if len(value) != 1:
            raise UserError(f"takes one value, got {len(value)}: {given}")
        (value,) = value
    if isinstance(value, bool) and argument.kind is not bool:
        raise UserError("needs a value")
    if argument.kind is dict and isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise UserError(f"takes JSON, got {value!r}: {error}") from None
    try:
        converted = TypeAdapter(argument.kind, config=ConfigDict(coerce_numbers_to_str=True)).validate_python(value)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise UserError(f"is {value!r}: {message[0].lower()}{message[1:]}") from None
    if isinstance(converted, str) and argument.name.endswith(_PATH_ENDINGS):
        if converted.startswith(("~", "$")) or (converted and os.path.exists(converted)):
            converted = absolute(converted)
    if argument.choices and converted not in argument.choices:
        raise UserError(f"is {value!r}; allowed: {', '.join(map(str, argument.choices))}")
    return converted


@functools.cache
def server_arguments() -> dict[str, ServerArgument]:
    """Every argument of the installed SGLang server, by each of its flags' names with underscores."""
    package = importlib.util.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        raise UserError("--sglang-... flags are checked against the package sglang, which is not installed")
    source = Path(package.submodule_search_locations[0]) / "srt" / "server_args.py"
    return read_server_arguments(source.read_text(encoding="utf-8"))


def read_server_arguments(source: str) -> dict[str, ServerArgument]:
    """Read the fields of the class ServerArgs, annotated `A[type, "help"]` or `A[type, Arg(aliases=..., ...)]`."""
    module = ast.parse(source)
    (server_args,) = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "ServerArgs"]
    constants = {
        node.targets[0].id: node.value
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    by_hand = _flags_added_by_hand(server_args)
    arguments: dict[str, ServerArgument] = {}
    for node in server_args.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        name, annotation = node.target.id, node.annotation
        options: dict[str, ast.expr] = {}
        if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "A":
            assert isinstance(annotation.slice, ast.Tuple)
            annotation, metadata = annotation.slice.elts
            if isinstance(metadata, ast.Call):
                options = {keyword.arg: keyword.value for keyword in metadata.keywords if keyword.arg is not None}
        elif name not in by_hand:
            continue
        if "no_cli" in options and name not in by_hand:
            continue
        flags = [ast.literal_eval(options[key]) for key in ("cli_name", "aliases") if key in options]
        primary = _bare(flags[0]) if "cli_name" in options else name
        aliases = [_bare(flag) for flag in flags[-1]] if "aliases" in options else []
        argument = ServerArgument(primary, _python_type(annotation, options), _choices(annotation, options, constants))
        arguments |= {flag: argument for flag in (primary, *aliases)}
    for old, new in by_hand.items():
        if old not in arguments and new in arguments:
            arguments[old] = replace(arguments[new], is_older=True)
    return arguments


def _flags_added_by_hand(server_args: ast.ClassDef) -> dict[str, str]:
    """Names that `add_cli_args` gives to `parser.add_argument` itself, each with the one that it is an older name of.

    A name that only turns something off or on which has values now is older than none.
    """
    functions = [node for node in server_args.body if isinstance(node, ast.FunctionDef)]
    (method,) = [function for function in functions if function.name == "add_cli_args"]
    calls = [node for node in ast.walk(method) if isinstance(node, ast.Call)]
    names: dict[str, str] = {}
    for call in calls:
        if ast.unparse(call.func) != "parser.add_argument":
            continue
        options = {keyword.arg: ast.unparse(keyword.value).strip("'") for keyword in call.keywords}
        newer = options.get("new_flag", "") if options.get("action") == "DeprecatedAliasStoreAction" else ""
        names |= {_bare(str(word.value)): _bare(newer) for word in call.args if isinstance(word, ast.Constant)}
    return names


def _bare(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _unwrap_optional(annotation: ast.expr) -> ast.expr:
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Optional":
        return annotation.slice
    return annotation


def _python_type(annotation: ast.expr, options: Mapping[str, ast.expr]) -> Any:
    """The Python type of a value. What SGLang parses from one text by itself stays a text, but for JSON objects."""
    written = ast.unparse(_unwrap_optional(annotation))
    if written.lower().startswith("dict["):
        return dict
    if "type_parser" in options:
        return int | str if written == "int" else str
    return _SCALARS.get(written) or _LISTS.get(written) or (list[str] if "nargs" in options else str)


def _choices(
    annotation: ast.expr, options: Mapping[str, ast.expr], constants: Mapping[str, ast.expr]
) -> tuple[Any, ...] | None:
    """Allowed values, where they are written down as a list, or as the name of one."""
    listed = options.get("choices")
    if isinstance(listed, ast.Name):
        listed = constants.get(listed.id)
    bare = _unwrap_optional(annotation)
    if listed is None and isinstance(bare, ast.Subscript) and ast.unparse(bare.value) == "Literal":
        listed = bare.slice
    if not isinstance(listed, ast.Tuple | ast.List):
        return None
    values = tuple(item.value for item in listed.elts if isinstance(item, ast.Constant))
    return values if len(values) == len(listed.elts) else None


def has_draft(algorithm: str | None) -> bool:
    """Whether an algorithm of --sglang-speculative-algorithm has a draft model; NGRAM looks up what was written."""
    return algorithm is not None and algorithm.upper() != "NGRAM"
