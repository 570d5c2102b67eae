"""Values that follow from others. Each has a reason, which `--print-config` shows."""

import uuid
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from miles.config.paths import absolute
from miles.config.run_config import SECTIONS
from miles.config.section import Derived, derivations_of, derives
from miles.config.values import Undetermined, Values


def derive(known: Mapping[str, Any], now: datetime) -> tuple[dict[str, Any], dict[str, str]]:
    """The values with all that follows from them, and the reason for each that is new or replaced.

    `known` lacks what was given wrongly; what would follow from it is then taken out too.
    """
    values, reasons = dict(known), {}
    if values.get("run_dir", "") is None:
        # Some characters of its own: runs that start in the same second, on any machines, share no folder.
        values["run_dir"] = absolute(f"runs/{now:%Y-%m-%d_%H-%M-%S}_{uuid.uuid4().hex[:8]}")
        reasons["run_dir"] = "the time of the start, and a number of its own"
    for names, function in DERIVATIONS:
        try:
            derived = list(function(Values(values)))
        except Undetermined:
            for name in names:
                if name in values and values[name] is None:
                    del values[name]
            continue
        for name, value, reason in derived:
            assert name in names, f"{function} derives {name} without declaring it"
            values[name], reasons[name] = value, reason
    return values, reasons


@derives("eps_clip_high")
def _clip(v: Values) -> Iterator[Derived]:
    if v.eps_clip_high is None:
        yield "eps_clip_high", v.eps_clip, "--eps-clip"


@derives("ref_load")
def _reference(v: Values) -> Iterator[Derived]:
    if v.needs_reference and v.ref_load is None:
        asked = "--use-kl-loss" if v.use_kl_loss else f"--kl-coef {v.kl_coef}"
        yield "ref_load", v.hf_checkpoint, f"{asked}: the reference is --hf-checkpoint"


@derives("normalize_advantages")
def _whitening(v: Values) -> Iterator[Derived]:
    if v.normalize_advantages is None and v.learns_from_samples:
        yield "normalize_advantages", v.estimator.whitens, f"--advantage-estimator {v.estimator.name}"


@derives("constant_loss_length")
def _constant_length(v: Values) -> Iterator[Derived]:
    if v.constant_loss_length is None and v.estimator.constant_length and v.learns_from_samples:
        if v.rollout_max_response_len is not None:
            reason = f"--advantage-estimator {v.estimator.name}: --rollout-max-response-len"
            yield "constant_loss_length", v.rollout_max_response_len, reason


@derives("critic_lr", "critic_load", "critic_save")
def _critic(v: Values) -> Iterator[Derived]:
    if not v.use_critic:
        return
    if v.critic_lr is None:
        yield "critic_lr", v.lr, "--lr"
    for name in ("load", "save"):
        folder = getattr(v, name)
        if getattr(v, f"critic_{name}") is None and folder is not None:
            yield f"critic_{name}", folder + "_critic", f"--{name} and _critic"


DERIVATIONS = [*(derivation for section in SECTIONS for derivation in section.derivations()), *derivations_of(__name__)]
