"""Values that follow from others. Each has a reason, which `--print-config` shows."""

import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

from miles.config.algorithm import WHITENED_ESTIMATORS
from miles.config.context_length import KEPT_BY_SGLANG, engine_context, longest_context
from miles.config.debug_rules import what_needs_no_engine
from miles.config.offload_rules import scratch_folder
from miles.config.paths import absolute
from miles.config.values import Undetermined, Values

Derived = tuple[str, Any, str]
_DERIVATIONS: list[tuple[tuple[str, ...], Callable[[Values], Iterator[Derived]]]] = []


def _derives(*names: str):
    def register(function: Callable[[Values], Iterator[Derived]]):
        _DERIVATIONS.append((names, function))
        return function

    return register


def derive(known: Mapping[str, Any], now: datetime) -> tuple[dict[str, Any], dict[str, str]]:
    """The values with all that follows from them, and the reason for each that is new or replaced.

    `known` lacks what was given wrongly; what would follow from it is then taken out too.
    """
    values, reasons = dict(known), {}
    if values.get("run_dir", "") is None:
        # Some characters of its own: runs that start in the same second, on any machines, share no folder.
        values["run_dir"] = absolute(f"runs/{now:%Y-%m-%d_%H-%M-%S}_{uuid.uuid4().hex[:8]}")
        reasons["run_dir"] = "the time of the start, and a number of its own"
    for names, function in _DERIVATIONS:
        try:
            found = list(function(Values(values)))
        except Undetermined:
            for name in names:
                if name in values and values[name] is None:
                    del values[name]
            continue
        for name, value, reason in found:
            assert name in names, f"{function.__name__} derives {name} without declaring it"
            values[name], reasons[name] = value, reason
    return values, reasons


@_derives("debug_train_only", "save_debug_rollout_data", "eval_interval")
def _loaded_samples(v: Values) -> Iterator[Derived]:
    """So that --load-debug-rollout-data can be added to the command line of the run that saved them."""
    if v.load_debug_rollout_data is not None:
        reason = "--load-debug-rollout-data: no engine runs"
        for name, value in (("debug_train_only", True), ("save_debug_rollout_data", None), ("eval_interval", None)):
            if getattr(v, name) != value:
                yield name, value, reason


@_derives("bf16")
def _precision(v: Values) -> Iterator[Derived]:
    if v.bf16 is None:
        yield "bf16", v.device == "cuda", f"--device {v.device}"


@_derives("bias_swiglu_fusion")
def _fusion(v: Values) -> Iterator[Derived]:
    if v.bias_swiglu_fusion is None:
        yield "bias_swiglu_fusion", v.device == "cuda", f"--device {v.device}"


@_derives("expert_tensor_parallel_size")
def _expert_tensor_parallel(v: Values) -> Iterator[Derived]:
    if v.expert_tensor_parallel_size is None:
        if v.expert_model_parallel_size > 1:
            yield "expert_tensor_parallel_size", 1, "--expert-model-parallel-size shares whole experts out"
        else:
            yield "expert_tensor_parallel_size", v.tensor_model_parallel_size, "--tensor-model-parallel-size"


def _lone_side(v: Values) -> str | None:
    if not v.needs_engines:
        return "no engine runs with " + what_needs_no_engine(v)
    return None if v.needs_trainer else "no trainer runs with --debug-rollout-only"


@_derives("rollout_external")
def _external_engines(v: Values) -> Iterator[Derived]:
    if v.rollout_external is None:
        addresses = v.rollout_external_engine_addrs
        yield "rollout_external", bool(addresses), "--rollout-external-engine-addrs" if addresses else "none is named"


@_derives("rollout_num_gpus")
def _rollout_gpus(v: Values) -> Iterator[Derived]:
    if not v.needs_engines:
        if v.rollout_num_gpus != 0:
            yield "rollout_num_gpus", 0, _lone_side(v)
    elif v.rollout_external and v.rollout_external_engine_addrs and v.rollout_num_gpus is None:
        size = v.rollout_num_gpus_per_engine
        count = len(v.rollout_external_engine_addrs)
        yield "rollout_num_gpus", count * size, f"{count} external engines of --rollout-num-gpus-per-engine {size}"
    elif v.colocate and v.rollout_num_gpus is None:
        yield "rollout_num_gpus", v.world_size, "--colocate: the engines use the trainer's GPUs"


@_derives("colocate")
def _nobody_to_share_with(v: Values) -> Iterator[Derived]:
    if v.colocate and _lone_side(v):
        yield "colocate", False, _lone_side(v)


@_derives("one_step_ahead", "fully_async")
def _nothing_to_overlap(v: Values) -> Iterator[Derived]:
    """So that a debug mode can be added to any command line."""
    for name in ("one_step_ahead", "fully_async"):
        if getattr(v, name) and not v.needs_engines:
            yield name, False, _lone_side(v)


@_derives("offload_train", "offload_rollout")
def _offload(v: Values) -> Iterator[Derived]:
    for name in ("offload_train", "offload_rollout"):
        given = getattr(v, name)
        if _lone_side(v):
            if given is not False:
                yield name, False, _lone_side(v)
        elif given is None:
            if v.offload is not None:
                yield name, v.offload, "--offload" if v.offload else "--no-offload"
            elif v.colocate:
                yield name, True, "--colocate"
            else:
                yield name, False, "neither --colocate nor --offload is given"


@_derives(
    "offload_train_target",
    "rematerialize_param_from_master_weight",
    "colocate_memory_peak_device",
    "check_residency",
    "stream_optimizer_state_to_disk",
)
def _nothing_to_hand_over(v: Values) -> Iterator[Derived]:
    """So that a debug mode can be added to any command line."""
    if _lone_side(v):
        for name, value in (
            ("offload_train_target", "cpu"),
            ("rematerialize_param_from_master_weight", False),
            ("colocate_memory_peak_device", "cpu"),
            ("check_residency", False),
        ):
            if getattr(v, name) != value:
                yield name, value, _lone_side(v)
        if v.stream_optimizer_state_to_disk and not v.needs_trainer:
            yield "stream_optimizer_state_to_disk", False, _lone_side(v)


@_derives("offload_train_disk_dir")
def _disk_folder(v: Values) -> Iterator[Derived]:
    if v.offload_train_disk_dir is None and v.trainer_uses_disk and scratch_folder().is_dir():
        folder = scratch_folder() / f"miles_train_offload_{os.getuid()}"
        yield "offload_train_disk_dir", str(folder), "$SCRATCH" if os.environ.get("SCRATCH") else "$SCRATCH is not set"


@_derives("offload_train_keep_host_buffers")
def _host_buffers(v: Values) -> Iterator[Derived]:
    # The disk has no such buffers: what is not None then was given.
    if v.offload_train_keep_host_buffers is None and v.offload_train_target == "cpu":
        peak = v.colocate_memory_peak_device
        yield "offload_train_keep_host_buffers", peak == "cpu", f"--colocate-memory-peak-device {peak}"


@_derives("async_max_concurrent_samples")
def _concurrent_samples(v: Values) -> Iterator[Derived]:
    if v.async_max_concurrent_samples is None and v.fully_async:
        yield "async_max_concurrent_samples", v.samples_per_rollout, "--fully-async: the samples of a rollout"


@_derives("global_batch_size", "num_steps_per_rollout")
def _steps(v: Values) -> Iterator[Derived]:
    samples, size, steps = v.samples_per_rollout, v.global_batch_size, v.num_steps_per_rollout
    if size is None:
        size = -(samples // -(steps or 1))
        reason = "one optimizer step per rollout" if steps is None else f"{samples} samples in {steps} steps"
        yield "global_batch_size", size, reason
    if steps is None:
        yield "num_steps_per_rollout", -(samples // -size), _cut(samples, size)


def _cut(samples: int, size: int) -> str:
    rest = samples % size
    if size >= samples:
        return "--global-batch-size is a whole rollout"
    return f"{samples} samples in steps of {size}" + (f", the last of {rest}" if rest else "")


@_derives("lr_decay_iters")
def _decay(v: Values) -> Iterator[Derived]:
    if v.use_critic and v.num_critic_only_steps:
        return  # Actor and critic take different numbers of steps: each one's schedule has its own.
    if v.lr_decay_iters is None and v.num_rollout is not None and v.steps_per_rollout > 0:
        steps = v.num_rollout * v.steps_per_rollout
        warmup = max(v.lr_warmup_iters, v.critic_lr_warmup_iters if v.use_critic else 0)
        if steps > warmup:
            yield "lr_decay_iters", steps, f"{v.num_rollout} rollouts of {v.steps_per_rollout} steps"
        else:
            yield "lr_decay_iters", warmup + 1, f"the run's {steps} steps end within the warm-up"


@_derives("eps_clip_high")
def _clip(v: Values) -> Iterator[Derived]:
    if v.eps_clip_high is None:
        yield "eps_clip_high", v.eps_clip, "--eps-clip"


@_derives("ref_load")
def _reference(v: Values) -> Iterator[Derived]:
    if v.needs_reference and v.ref_load is None:
        asked = "--use-kl-loss" if v.use_kl_loss else f"--kl-coef {v.kl_coef}"
        yield "ref_load", v.hf_checkpoint, f"{asked}: the reference is --hf-checkpoint"


@_derives("normalize_advantages")
def _whitening(v: Values) -> Iterator[Derived]:
    if v.normalize_advantages is None and v.learns_from_samples:
        whitened = v.advantage_estimator in WHITENED_ESTIMATORS
        yield "normalize_advantages", whitened, f"--advantage-estimator {v.advantage_estimator}"


@_derives("constant_loss_length")
def _constant_length(v: Values) -> Iterator[Derived]:
    if v.constant_loss_length is None and v.advantage_estimator == "dr_grpo" and v.learns_from_samples:
        if v.rollout_max_response_len is not None:
            reason = "--advantage-estimator dr_grpo: --rollout-max-response-len"
            yield "constant_loss_length", v.rollout_max_response_len, reason


@_derives("critic_lr", "critic_load", "critic_save")
def _critic(v: Values) -> Iterator[Derived]:
    if not v.use_critic:
        return
    if v.critic_lr is None:
        yield "critic_lr", v.lr, "--lr"
    for name in ("load", "save"):
        folder = getattr(v, name)
        if getattr(v, f"critic_{name}") is None and folder is not None:
            yield f"critic_{name}", folder + "_critic", f"--{name} and _critic"


@_derives("eval_max_prompt_len", "eval_max_context_len")
def _eval_lengths(v: Values) -> Iterator[Derived]:
    # Before the limit of rollouts that is derived, which does not become one of evaluations.
    for name in ("max_prompt_len", "max_context_len"):
        given = getattr(v, f"rollout_{name}")
        if getattr(v, f"eval_{name}") is None and given is not None:
            yield f"eval_{name}", given, "--rollout-" + name.replace("_", "-")


@_derives("rollout_max_context_len", "eval_max_context_len")
def _context(v: Values) -> Iterator[Derived]:
    longest = longest_context(v) if v.needs_engines else None
    if longest is None:
        return
    for name in ("rollout_max_context_len", "eval_max_context_len"):
        given = getattr(v, name)
        # More than the context is refused.
        if given is None or longest < given <= longest + KEPT_BY_SGLANG:
            reason = f"{engine_context(v)} tokens of context, of which SGLang keeps {KEPT_BY_SGLANG}"
            yield name, longest, reason


@_derives("rollout_max_prompt_len")
def _prompt_length(v: Values) -> Iterator[Derived]:
    if v.rollout_max_prompt_len is None and v.rollout_max_context_len is not None:
        yield "rollout_max_prompt_len", v.rollout_max_context_len - 1, "one token less than --rollout-max-context-len"


@_derives("rollout_request_timeout")
def _request_timeout(v: Values) -> Iterator[Derived]:
    """Long enough for an engine that is full of longest responses: dead and hung engines are found in other ways."""
    if v.rollout_request_timeout is None:
        longest = max(v.rollout_max_response_len or 0, v.eval_max_response_len or 0)
        seconds = 1800.0 + v.sglang_server_concurrency * longest / 2000
        reason = f"1800 s, and {v.sglang_server_concurrency} responses of {longest} tokens at 2,000 a second"
        if v.sglang_router_policy is not None and seconds > v.sglang_router_request_timeout_secs:
            seconds, reason = float(v.sglang_router_request_timeout_secs), "--sglang-router-request-timeout-secs"
        yield "rollout_request_timeout", seconds, reason


def _falls_back(name: str, source: str) -> None:
    @_derives(name)
    def fall_back(v: Values) -> Iterator[Derived]:
        if getattr(v, name) is None and getattr(v, source) is not None:
            yield name, getattr(v, source), "--" + source.replace("_", "-")


_falls_back("eval_temperature", "rollout_temperature")
_falls_back("eval_top_p", "rollout_top_p")
_falls_back("eval_top_k", "rollout_top_k")
_falls_back("eval_max_response_len", "rollout_max_response_len")
_falls_back("eval_input_key", "input_key")
_falls_back("eval_label_key", "label_key")
_falls_back("eval_reward_key", "reward_key")
_falls_back("eval_tool_key", "tool_key")
_falls_back("over_sampling_batch_size", "rollout_batch_size")
