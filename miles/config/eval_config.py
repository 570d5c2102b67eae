"""Evaluation sets: of --eval-prompt-data, or of --eval-config, a YAML file in which each has settings of its own."""

# A setting that is not given is None, whatever its type (EvalSetConfig).
# mypy: disable-error-code="assignment"

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from pydantic import Field, JsonValue, ValidationError

from miles.config.names import nearest
from miles.config.paths import PromptFile
from miles.config.reward import RewardName
from miles.config.rollout import StopIds, StopTexts
from miles.config.section import Section
from miles.config.yaml_file import load_yaml


class EvalSetConfig(Section):
    """One evaluation set. A setting that is not given is None here, whatever its type, and is that of the flags."""

    title: ClassVar[str] = "Evaluation set"

    name: str = Field(pattern=r"^[^\s/]+$", description="The metric is eval/NAME: no white space, no slash.")
    path: PromptFile = Field(description="Prompts, as in --eval-prompt-data.")
    rm_type: RewardName = Field(None, description="Built-in reward, in place of --rm-type and of the rows' own.")
    input_key: str = Field(None, description="Column with the prompt.")
    label_key: str | None = Field(None, description="Column with the right answer; null: there is none.")
    tool_key: str = Field(None, description="Column with tools.")
    metadata_key: str = Field(None, description="Column with an object that is handed to the reward.")
    n_samples_per_eval_prompt: int = Field(None, gt=0, description="Responses sampled for each prompt.")
    temperature: float = Field(None, ge=0, description="0 is greedy.")
    top_p: float = Field(None, gt=0, le=1, description="The share of probability kept.")
    top_k: int = Field(None, ge=-1, description="Sample among this many likeliest tokens; -1: among all.")
    max_response_len: int = Field(None, gt=0, description="Most tokens of a response.")
    stop: StopTexts = Field(None, description="Texts that end a response; null: none.")
    stop_token_ids: StopIds = Field(None, description="Token ids that end a response; null: the model's own.")
    min_new_tokens: int = Field(None, ge=0, description="Fewest tokens of a response.")
    custom_generate_function_path: str | None = Field(
        None, description="Function that generates a sample, by dotted path; null: Miles' own."
    )
    metadata_overrides: dict[str, JsonValue] = Field(
        default_factory=dict, description="Entries laid over each row's metadata."
    )

    def given(self, name: str, otherwise: Any) -> Any:
        """The setting `name`, or `otherwise` where it is not given."""
        return getattr(self, name) if name in self.model_fields_set else otherwise


SETTINGS = tuple(name for name in EvalSetConfig.model_fields if name not in ("name", "path"))


def eval_set_configs(prompt_data: list[str] | None, file: str | None) -> tuple[list[EvalSetConfig], list[str]]:
    """The evaluation sets, in their order, and what is wrong with what names them.

    Args:
        prompt_data: --eval-prompt-data: NAME FILE NAME FILE ...
        file: --eval-config.
    """
    if file is not None:
        if prompt_data:
            return [], [f"--eval-config {file} and --eval-prompt-data are two ways to name evaluation sets; give one"]
        where, (entries, problems) = f"--eval-config {file}", _entries(file)
    else:
        data = prompt_data or []
        if len(data) % 2:
            return [], [f"--eval-prompt-data takes pairs NAME FILE, got {len(data)} values: {' '.join(data)}"]
        where, problems = "--eval-prompt-data", []
        entries = [{"name": name, "path": path} for name, path in zip(data[::2], data[1::2], strict=True)]
    sets = []
    for entry in entries:
        try:
            sets.append(EvalSetConfig(**entry))
        except ValidationError as error:
            problems += [f"{where}: {_explain(entry, detail)}" for detail in error.errors()]
    names = [entry.name for entry in sets]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"{where} has the name {name} more than once; name each set differently")
    return sets, problems


def _entries(file: str) -> tuple[list[dict[str, Any]], list[str]]:
    """What the file says of each set, the defaults laid under it, without keys that are unknown."""
    where = f"--eval-config {file}"
    content, problems = load_yaml("--eval-config", file)
    if problems:
        return [], problems
    if isinstance(content, dict) and list(content) == ["eval"]:
        content = content["eval"]
    if not isinstance(content, dict) or not isinstance(content.get("datasets"), list | dict) or not content["datasets"]:
        return [], [f"{where} must hold `datasets`, a list of sets with `name` and `path`, and may hold `defaults`"]
    problems += _unknown(where, content, ("defaults", "datasets"))
    defaults = {} if content.get("defaults") is None else content["defaults"]
    if not isinstance(defaults, dict):
        return [], [*problems, f"{where}: defaults is {defaults!r}; settings as `name: value` lines are allowed"]
    problems += _unknown(f"{where}: defaults", defaults, SETTINGS)
    defaults = {name: value for name, value in defaults.items() if name in SETTINGS}

    datasets = content["datasets"]
    if isinstance(datasets, dict):  # name: settings
        datasets = [{"name": name, **entry} if isinstance(entry, dict) else entry for name, entry in datasets.items()]
    entries = []
    for number, entry in enumerate(datasets, 1):
        if not isinstance(entry, dict):
            problems.append(f"{where}: set {number} is {entry!r}; settings as `name: value` lines are allowed")
            continue
        problems += _unknown(f"{where}: set {entry.get('name', number)}", entry, EvalSetConfig.model_fields)
        known = {name: value for name, value in entry.items() if name in EvalSetConfig.model_fields}
        entries.append(defaults | known)
    return entries, problems


def _unknown(where: str, given: Mapping[Any, Any], known: Any) -> Iterator[str]:
    for key in given:
        if key not in known:
            yield f"{where}: key {key} is unknown{nearest(str(key), known)}"


def _explain(entry: Mapping[str, Any], detail: Mapping[str, Any]) -> str:
    key, *path = detail["loc"]
    if detail["type"] == "missing":
        return f"set {entry.get('name', entry)} has no {key}; a name and a path are required"
    place = "".join(f"[{step}]" for step in path)
    message = detail["msg"].removeprefix("Value error, ")
    if key == "name":
        message = "a name without white space or slash is needed"
    return f"set {entry.get('name')}: {key}{place} is {detail['input']!r}: {message[0].lower()}{message[1:]}"
