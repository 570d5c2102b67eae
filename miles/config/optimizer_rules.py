"""What Adam's schedule of a configuration must satisfy."""

from collections.abc import Iterator

from miles.config.names import flag_of
from miles.config.values import Values


def _rates(v: Values) -> Iterator[str]:
    if v.lr_decay_iters is not None and v.lr_warmup_iters >= v.lr_decay_iters:
        yield f"--lr-warmup-iters {v.lr_warmup_iters} must be less than --lr-decay-iters {v.lr_decay_iters}"
    if v.min_lr > v.lr:
        yield f"--min-lr {v.min_lr} must not be above --lr {v.lr}"


def _rate_schedule(v: Values) -> Iterator[str]:
    if v.lr_warmup_fraction is not None and v.lr_warmup_iters:
        yield (
            f"--lr-warmup-fraction {v.lr_warmup_fraction} and --lr-warmup-iters {v.lr_warmup_iters} both set the "
            "warm-up; keep one"
        )
    if v.lr_warmup_init > v.lr:
        yield f"--lr-warmup-init {v.lr_warmup_init} is above --lr {v.lr}; the warm-up rises, so give a lower one"
    wsd = v.lr_decay_style == "WSD"
    if wsd and v.lr_wsd_decay_iters is None:
        yield "--lr-decay-style WSD needs --lr-wsd-decay-iters, the optimizer steps of the decay at its end; add it"
    if wsd and v.lr_wsd_decay_iters is not None and v.lr_wsd_decay_iters > (v.lr_decay_iters or v.lr_wsd_decay_iters):
        yield (
            f"--lr-wsd-decay-iters {v.lr_wsd_decay_iters} is more than --lr-decay-iters {v.lr_decay_iters}, at whose "
            "end it decays; lower the first or raise the second"
        )
    for name, default in (("lr_wsd_decay_iters", None), ("lr_wsd_decay_style", "exponential")):
        if not wsd and getattr(v, name) != default:
            yield f"{flag_of(name)} is for --lr-decay-style WSD and that is {v.lr_decay_style}; drop it"


def _weight_decay(v: Values) -> Iterator[str]:
    start, end, style = v.start_weight_decay, v.end_weight_decay, v.weight_decay_incr_style
    if style == "constant":
        for name in ("start_weight_decay", "end_weight_decay"):
            if getattr(v, name) is not None:
                yield (
                    f"{flag_of(name)} is for a weight decay that rises and --weight-decay-incr-style is constant; "
                    "choose linear or cosine, or use --weight-decay"
                )
    elif start is None or end is None:
        yield f"--weight-decay-incr-style {style} needs --start-weight-decay and --end-weight-decay; add both"
    elif end < start:
        yield f"--end-weight-decay {end} is below --start-weight-decay {start}; weight decay can only rise"


OPTIMIZER_RULES = (_rates, _rate_schedule, _weight_decay)


def optimizer_warnings(v: Values) -> Iterator[str]:
    """What is allowed, and probably not meant."""
    if not v.needs_trainer:
        return
    if v.lr == 0:
        yield "--lr 0: the weights will not change"
    if v.min_lr > 0 and v.lr_decay_style == "constant":
        yield f"--min-lr {v.min_lr} has no effect with --lr-decay-style constant"
    for name in ("lr_warmup_iters", *(("critic_lr_warmup_iters",) if v.use_critic else ())):
        if getattr(v, name) == 1 and v.lr_warmup_init == 0:
            yield (
                f"{flag_of(name)} 1: the one step of the warm-up has the rate --lr-warmup-init 0.0 and changes no "
                "weight; drop it, or give a higher --lr-warmup-init"
            )
