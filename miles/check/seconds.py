"""How long each phase of a step takes at least: bytes over links, operations at an assumed share of the peak."""

from dataclasses import dataclass

import numpy as np

from miles.check.engine import kv_bytes_per_token
from miles.check.ledger import STREAMED, Device, Ledger

# Shares of the data sheet's operations, and of the memory's rate in decoding. A 4B model trains at 0.43 to 0.45 on one
# H200 (train_step.json); the other two are assumed.
TRAIN_MFU, GENERATE_MFU, DECODE_SHARE = 0.40, 0.30, 0.6
# Of a node's disk: what one reads and writes at past the page cache (sleep_wake.json).
DISK_RATE = 2.5e9
# From a trainer's bucket into an engine's weights on the same GPU (weight_sync.json).
COPY_RATE = 1.3e11


@dataclass(frozen=True)
class Duration:
    """Of one phase of a step: seconds, and what they are made of."""

    phase: str
    seconds: float
    why: str


def durations(ledger: Ledger) -> list[Duration]:
    """The phases of one rollout and its steps, every response as long as it may be."""
    config = ledger.config
    result = []
    if ledger.engine is not None and ledger.engine.tokens >= ledger.work.longest:
        result.append(_generate(ledger))
    if config.needs_trainer:
        wake, sleep = _move(ledger, "wake", "in"), _move(ledger, "sleep", "out")
        result += [wake] if wake.seconds else []
        result += _train(ledger)
        result += [sleep] if sleep.seconds else []
        if config.needs_engines:
            result.append(_sync(ledger))
    return result


def total_seconds(ledger: Ledger) -> float:
    """Of a step; where both sides have GPUs of their own and work at the same time, of the slower one."""
    seconds = {duration.phase: duration.seconds for duration in durations(ledger)}
    if ledger.config.overlaps:
        generate = seconds.pop("generate", 0.0)
        return max(generate, sum(seconds.values()))
    return sum(seconds.values())


def _trainers(ledger: Ledger) -> list[Device]:
    return [device for device in ledger.devices if device.stage is not None]


def _move(ledger: Ledger, name: str, way: str) -> Duration:
    """The slowest rank's copy over its own link; a disk is shared by the ranks of a node."""
    config = ledger.config
    size = max(device.walk.copied[way] for device in _trainers(ledger))
    if config.offload_train_target == "disk":
        size *= config.actor_num_gpus_per_node
        return Duration(name, size / DISK_RATE, _of_the_disk(size))
    link = ledger.hardware.host_link
    return Duration(name, size / link, f"{size / 1e9:.1f} GB a GPU, host link at {link / 1e9:.0f} GB/s")


def _of_the_disk(size: float) -> str:
    return f"{size / 1e9:.1f} GB a node, disk at {DISK_RATE / 1e9:.1f} GB/s"


def _forward_flops(ledger: Ledger) -> float:
    """Of a forward pass over a rollout's samples."""
    work, config = ledger.work, ledger.config
    responses = work.longest * work.responses // max(work.tokens, 1)
    one = ledger.model.flops.of(np.array([work.longest]), np.array([responses])).item()
    return one * config.samples_per_rollout


def _train(ledger: Ledger) -> list[Duration]:
    config, hardware, forward = ledger.config, ledger.hardware, _forward_flops(ledger)
    rate = config.world_size * hardware.flops * TRAIN_MFU
    bubble = 1 + (config.pipeline_model_parallel_size - 1) / ledger.work.micro_batches
    passes = 0
    if config.learns_from_samples:
        passes = config.needs_reference + (config.opd_teacher_load is not None)
        passes += not (config.use_rollout_logprobs or config.skip_actor_forward_only)
        passes += config.use_critic  # its values
    again = _recomputed_share(ledger)
    trained = (3 + again) * (2 if config.use_critic else 1)

    def said(count: float) -> str:
        flops = f"{count * forward / 1e15:.1f} PFLOP on {config.world_size} GPUs at {TRAIN_MFU:.0%} of the peak"
        return flops + (f", bubbles x {bubble:.2f}" if bubble > 1 else "")

    result = [Duration("log-probabilities", passes * forward / rate * bubble, said(passes))] if passes else []
    result.append(Duration("train", trained * forward / rate * bubble, said(trained)))
    if config.stream_optimizer_state_to_disk:
        size = 2 * ledger.host.disk[STREAMED] * config.steps_per_rollout
        result.append(Duration("optimizer", size / DISK_RATE, _of_the_disk(size)))
    return result


def _recomputed_share(ledger: Ledger) -> float:
    """Of a forward pass that full recomputation repeats."""
    config = ledger.config
    if config.recompute_granularity != "full":
        return 0.0
    if config.recompute_method == "uniform":
        return 1.0
    layers = max(len(chunk) for stage in ledger.model.stages for chunk in stage.chunks)
    return min(1.0, (config.recompute_num_layers or 0) / layers)


def _generate(ledger: Ledger) -> Duration:
    """The greater of what the products take, and of what reading weights and keys for every token takes."""
    config, hardware, work, engine = ledger.config, ledger.hardware, ledger.work, ledger.engine
    assert engine is not None and config.rollout_num_gpus is not None
    gpus = config.rollout_num_gpus
    products = _forward_flops(ledger) / (gpus * hardware.flops * GENERATE_MFU)
    samples = -(config.samples_per_rollout // -config.num_engines)
    held = max(1, min(samples, config.sglang_server_concurrency, engine.tokens // work.longest))
    responses = work.longest * work.responses // max(work.tokens, 1)
    keys = held * work.longest / 2 * kv_bytes_per_token(ledger.model, config.engine_tp_size)
    reading = -(samples // -held) * responses * (engine.weights + keys) / (hardware.bandwidth * DECODE_SHARE)
    if products > reading:
        flops = _forward_flops(ledger) / 1e15
        return Duration("generate", products, f"{flops:.1f} PFLOP on {gpus} GPUs at {GENERATE_MFU:.0%} of the peak")
    return Duration(
        "generate",
        reading,
        f"{responses:,} tokens, {held} at a time on each engine, memory at {DECODE_SHARE:.0%} of its rate",
    )


def _sync(ledger: Ledger) -> Duration:
    """Gathered over the slowest link that a rank's weights cross, then copied, or sent to remote engines."""
    config, hardware, model = ledger.config, ledger.hardware, ledger.model
    size = model.traits.itemsize * model.parameters
    across = config.actor_num_nodes > 1 and config.model_parallel_size * config.expert_model_parallel_size > (
        config.actor_num_gpus_per_node
    )
    link = hardware.network if across else hardware.nvlink
    gathers = config.model_parallel_size > 1 or config.expert_model_parallel_size > 1
    seconds = size / COPY_RATE + (size / link if gathers else 0.0)
    why = f"{size / 1e9:.1f} GB to each engine"
    if gathers:
        why += f", gathered at {link / 1e9:.0f} GB/s"
    if config.num_colocated_engines < config.num_engines:
        disk = config.update_weight_transfer_mode == "disk"
        rate = DISK_RATE / 2 if disk else hardware.network if config.actor_num_nodes > 1 else hardware.nvlink
        seconds += size / rate
        why += f", sent at {rate / 1e9:.1f} GB/s" + (" (written and read)" if disk else "")
    return Duration("sync", seconds, why)
