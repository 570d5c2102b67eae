"""Where rewards come from."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from miles.config.dotted_paths import dotted_path_problem
from miles.config.effect import OnlyWith, engines_run
from miles.config.section import SameAs, Section, rule
from miles.config.values import Values
from miles.rewards import BUILT_IN, Reward

if TYPE_CHECKING:
    RewardName = str
else:
    RewardName = Literal[tuple(BUILT_IN)]


class RewardConfig(Section):
    title: ClassVar[str] = "Reward"

    rm_type: RewardName | None = Field(
        None,
        description="Built-in reward; a sample whose metadata has rm_type takes that one. "
        + " ".join(f"{reward.name}: {reward.help}." for reward in BUILT_IN.values()),
    )
    rm_url: str | None = Field(
        None,
        description="http://... or https://...: where remote_rm posts {prompt, response, label} as JSON, for a number, "
        "an object of numbers, or null.",
    )
    rm_request_timeout: float = Field(120.0, gt=0, description="Seconds that one request of remote_rm may take.")
    rm_request_retries: int = Field(
        3, ge=0, description="Further attempts of a request of remote_rm: lost connection, cut body, timeout, 5xx, 429."
    )
    rm_max_concurrency: int = Field(64, gt=0, description="Requests of remote_rm in flight at most.")
    custom_rm_path: str | None = Field(
        None,
        description="Your own reward instead, by dotted path: a function of (config, sample), async or not, that "
        "returns a number, a dict of numbers, or None to abstain.",
    )
    group_rm: Annotated[
        bool,
        OnlyWith(
            "--custom-rm-path",
            note="a function of (config, samples): the built-in rewards look at one sample each",
            where=engines_run,
        ),
    ] = Field(
        False,
        description="--custom-rm-path is a function of (config, samples): the samples of one prompt, for a list of "
        "as many rewards.",
    )
    reward_key: str | None = Field(None, description="The entry that trains, where the reward is a dict.")
    eval_reward_key: Annotated[str | None, SameAs("reward_key")] = Field(
        None, description="The entry that evaluation shows, where the reward is a dict. Unset: --reward-key."
    )
    max_reward_error_fraction: float = Field(
        0.05, ge=0, le=1, description="Share of a rollout's samples whose reward may fail before the run stops."
    )


@rule
def _one_of_two(v: Values) -> Iterator[str]:
    if not v.needs_engines:
        return
    asked = "exactly one of --rm-type and --custom-rm-path must be given"
    if v.rm_type is not None and v.custom_rm_path is not None:
        yield f"{asked}, both are ({v.rm_type} and {v.custom_rm_path})"
    if not v.has_reward and not v.use_opd:
        yield (
            f"{asked}, neither is; a reward is optional only with --use-opd, and where a function of your own "
            "generates the samples and may set it (--custom-generate-function-path)"
        )


@rule
def _function(v: Values) -> Iterator[str]:
    if v.needs_engines and v.custom_rm_path is not None:
        if problem := dotted_path_problem("--custom-rm-path", v.custom_rm_path, "my_module.reward"):
            yield problem


@rule
def _needs(v: Values) -> Iterator[str]:
    if v.rm_type is not None and v.needs_engines:
        yield from missing(BUILT_IN[v.rm_type], f"--rm-type {v.rm_type}", v, v.label_key, "--label-key")


@rule
def _keys(v: Values) -> Iterator[str]:
    if v.rm_type is None or not v.needs_engines:
        return
    for flag, key in (("--reward-key", v.reward_key), ("--eval-reward-key", v.eval_reward_key)):
        # Unset, the second is the first, of which something is said already.
        if key is not None or flag == "--reward-key":
            yield from wrong_key(BUILT_IN[v.rm_type], f"--rm-type {v.rm_type}", flag, key)


@rule
def _address(v: Values) -> Iterator[str]:
    if v.rm_url is None:
        return
    try:
        url = urlsplit(v.rm_url)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        usable = False
    if not usable:
        yield f"--rm-url {v.rm_url} must be an address such as http://10.0.0.7:8000/reward"


def missing(reward: Reward, asked: str, v: Values, label_key: str | None, label_flag: str) -> Iterator[str]:
    """What a built-in reward needs, and a run or an evaluation set does not give it.

    Args:
        reward: the reward.
        asked: what asks for it, as the user wrote it.
        v: the configuration.
        label_key: the column of its labels.
        label_flag: what names that.
    """
    if reward.read_label is not None and label_key is None:
        yield f"{asked} needs {label_flag}, the column with the right answer"
    for needs in reward.missing_flags(v):
        yield f"{asked} {needs}"


def wrong_key(reward: Reward, asked: str, flag: str, key: str | None) -> Iterator[str]:
    """What is wrong with the key that chooses among the numbers of a built-in reward."""
    if reward.numbers and key is None:
        numbers = " and ".join(f"{name} ({values})" for name, values in reward.numbers.items())
        yield f"{asked} gives {numbers}: choose one with {flag}"
    elif reward.numbers and key not in reward.numbers:
        yield f"{flag} {key} is no number of {asked}, which gives {' and '.join(reward.numbers)}"
