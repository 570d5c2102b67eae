"""Adam's settings of a run that goes on from a checkpoint: what the user gives now, else those it was saved with."""

from collections.abc import Mapping
from typing import Any

from miles.config.names import flag_of
from miles.config.optimizer import OptimizerConfig
from miles.config.run_config import RunConfig
from miles.config.validate import rules_of
from miles.config.values import Values
from miles.utils.errors import UserError

# Settings that say one thing together: of each row all are the user's if one is given, else all are the checkpoint's.
_TOGETHER = (
    ("lr",),
    ("min_lr",),
    ("lr_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_style"),
    ("lr_decay_iters",),
    ("lr_warmup_iters", "lr_warmup_fraction"),
    ("lr_warmup_init",),
    ("weight_decay", "weight_decay_incr_style", "start_weight_decay", "end_weight_decay"),
    ("adam_beta1",),
    ("adam_beta2",),
    ("adam_eps",),
)


def settings_of(config: RunConfig) -> dict[str, Any]:
    """What a checkpoint keeps of `config`. `lr_decay_iters` is None where it follows from the length of the run."""
    settings = {name: getattr(config, name) for names in _TOGETHER for name in names}
    if "lr_decay_iters" not in config.given:
        settings["lr_decay_iters"] = None
    return settings


def settings_without_names(scheduler: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of the settings of a checkpoint that does not keep them by name.

    The length of the decay is left out: whether it was given or followed from that of the run is not known.

    Args:
        scheduler: the state of Megatron's OptimizerParamScheduler.
        group: of the parameters, as torch's optimizer has it.
    """
    constant = scheduler["wd_incr_style"] == "constant"
    settings = {
        "lr": scheduler["max_lr"],
        "min_lr": scheduler["min_lr"],
        "lr_warmup_iters": scheduler["lr_warmup_steps"],
        "lr_warmup_fraction": None,
        "weight_decay_incr_style": scheduler["wd_incr_style"],
        "start_weight_decay": None if constant else scheduler["start_wd"],
        "end_weight_decay": None if constant else scheduler["end_wd"],
        "adam_beta1": group["betas"][0],
        "adam_beta2": group["betas"][1],
        "adam_eps": group["eps"],
    }
    if constant:
        settings["weight_decay"] = scheduler["end_wd"]
    # Of WSD it does not say how the end decays.
    if scheduler["lr_decay_style"] != "WSD":
        settings |= {
            "lr_decay_style": scheduler["lr_decay_style"],
            "lr_wsd_decay_iters": None,
            "lr_wsd_decay_style": RunConfig.model_fields["lr_wsd_decay_style"].default,
        }
    return settings


def continued(config: RunConfig, saved: Mapping[str, Any]) -> tuple[RunConfig, list[str]]:
    """`config` with a checkpoint's settings where the user gave none, and a sentence on each difference of the two.

    Args:
        saved: what `settings_of` or `settings_without_names` made of the run that saved.

    Raises:
        ValueError: the two do not go together.
    """
    # A decay without a length of its own ends with the run, and how long that is the user has given.
    known = {name: value for name, value in saved.items() if name != "lr_decay_iters" or value is not None}
    kept, sentences = {}, []
    for names in _TOGETHER:
        given = not config.given.isdisjoint(names)
        for name in (name for name in names if name in known):
            flag, now, before = flag_of(name), getattr(config, name), known[name]
            if not given:
                kept[name] = before
            if now != before and given:
                sentences.append(f"{flag} {_shown(now)} replaces the checkpoint's {_shown(before)}")
            elif now != before:
                sentences.append(f"{flag} is not given: the checkpoint's {_shown(before)} stays, not {_shown(now)}")
    merged = config.model_copy(update=kept).with_given(config.given | kept.keys())
    problems = [problem for rule in rules_of(OptimizerConfig) for problem in rule(Values(dict(merged)))]
    if problems:
        raise UserError(
            f"{'; '.join(problems)} (what is not given is as in the checkpoint: "
            f"{', '.join(f'{flag_of(name)} {_shown(value)}' for name, value in kept.items())})"
        )
    return merged, sentences


def _shown(value: Any) -> str:
    return "(unset)" if value is None else str(value)
