"""The whole ledger of a run: each kind of device, the hosts, and what does not fit."""

from collections import Counter
from dataclasses import dataclass

from miles.check.contents import (
    Work,
    contents_of,
    moment_bytes,
    optimizer_share,
    work_of,
)
from miles.check.engine import EngineBytes, engine_bytes, kv_bytes_per_token
from miles.check.hardware import Hardware
from miles.check.parameters import Model, read_model
from miles.check.walk import Column, Walk
from miles.config import RunConfig

# Host memory of processes: measured of a trainer's (sleep_wake.json), taken to be so of an engine's; the driver, the
# rollout manager and Ray's own.
TRAINER_PROCESS, ENGINE_PROCESS, DRIVER = 2.3e9, 2.3e9, 4e9
# Of a token on its way through Ray: its id, its log-probability, its mask and advantages, in a batch and in its shards.
BATCH_BYTES_PER_TOKEN = 2 * 24
# A GPU that is fuller than this is said to be tight: torch's allocator has gaps, which nothing here counts.
TIGHT = 0.95
STREAMED = "the streamed optimizer"


@dataclass(frozen=True)
class Device:
    """One kind of GPU: all with the same parties and the same pipeline stage.

    Args:
        name: which it is. count: how many there are.
        walk: what it holds in each phase.
        stage: of its trainer's rank; None: without one.
    """

    name: str
    count: int
    walk: Walk
    stage: int | None

    @property
    def totals(self) -> dict[Column, float]:
        """Bytes by phase."""
        return {column: sum(held.values()) for column, held in self.walk.gpu.items() if held}

    @property
    def peak(self) -> float:
        """The most of all phases."""
        return max(self.totals.values(), default=0.0)


@dataclass(frozen=True)
class Host:
    """A node's memory and disk, by line and phase; the fullest node's."""

    memory: dict[str, dict[Column, float]]
    disk: dict[str, float]

    @property
    def totals(self) -> dict[Column, float]:
        """Bytes of memory by phase."""
        total: Counter[Column] = Counter()
        for values in self.memory.values():
            total.update(values)
        return dict(total)


@dataclass(frozen=True)
class Shortage:
    """What does not fit: where, in which phase, and by how many bytes."""

    where: str
    column: Column
    missing: float
    of_host: bool


@dataclass(frozen=True)
class Ledger:
    """All of it.

    Args:
        config, hardware, model, work: what it was made of.
        devices: the fullest first.
        host: None where no trainer and no engine is placed.
        engine: one GPU's part of an engine.
    """

    config: RunConfig
    hardware: Hardware
    model: Model
    work: Work
    devices: tuple[Device, ...]
    host: Host
    engine: EngineBytes | None

    @property
    def shortages(self) -> list[Shortage]:
        """Worst first, one for each device or host."""
        result = []
        if self.engine is not None and self.engine.tokens < self.work.longest:
            missing = self.engine.weights + self.work.longest * self._kv_per_token() - self._pool_and_weights()
            result.append(Shortage("the engine's KV pool", Column.GENERATE, missing, of_host=False))
        worst: dict[tuple[Column, int], Shortage] = {}
        for device in self.devices:
            column, held = max(device.totals.items(), key=lambda pair: pair[1])
            if held > self.hardware.memory:
                # Stages that lack the same are one.
                missing = held - self.hardware.memory
                worst.setdefault((column, round(missing / 1e8)), Shortage(device.name, column, missing, of_host=False))
        result += worst.values()
        column, held = max(self.host.totals.items(), key=lambda pair: pair[1])
        if held > self.hardware.host_memory:
            result.append(Shortage("the host of a node", column, held - self.hardware.host_memory, of_host=True))
        return sorted(result, key=lambda shortage: -shortage.missing)

    def _kv_per_token(self) -> float:
        return kv_bytes_per_token(self.model, self.config.engine_tp_size)

    def _pool_and_weights(self) -> float:
        assert self.engine is not None
        return self.engine.weights + self.engine.kv_pool


def ledger_of(config: RunConfig, hardware: Hardware, model: Model | None = None) -> Ledger:
    """What the run needs on such machines. Loads Megatron where `model` is not given.

    Raises:
        UserError: the model's family is unknown, or cannot have these parallel sizes.
    """
    model = model or read_model(config)
    work = work_of(config)
    own = config.needs_engines and not config.rollout_external
    engine = engine_bytes(config, model, hardware.memory) if own else None
    devices = sorted(
        _devices(config, model, engine, work),
        key=lambda device: (device.peak, device.totals.get(Column.TRAIN, 0.0)),
        reverse=True,
    )
    return Ledger(config, hardware, model, work, tuple(devices), _host(config, model, work, devices, engine), engine)


def _devices(config: RunConfig, model: Model, engine: EngineBytes | None, work: Work) -> list[Device]:
    result = []
    shared = engine if config.colocate else None
    if config.needs_trainer:
        stages = len(model.stages)
        for stage in range(stages):
            name = "GPU of trainer and engine" if shared else "GPU of the trainer"
            name += f", stage {stage}" if stages > 1 else ""
            contents = contents_of(config, model, stage, shared, work)
            result.append(Device(name, config.world_size // stages, Walk(config, contents), stage))
    lone = config.reserved_rollout_gpus - (config.world_size if shared and config.needs_trainer else 0)
    if engine is not None and lone > 0:
        contents = contents_of(config, model, None, engine, work)
        result.append(Device("GPU of an engine", lone, Walk(config, contents), None))
    return result


def _host(config: RunConfig, model: Model, work: Work, devices: list[Device], engine: EngineBytes | None) -> Host:
    """The node with most pinned memory among the trainer's, with the engines that are on it."""
    trainers = {device.stage: device for device in devices if device.stage is not None}
    ranks = config.actor_num_gpus_per_node if config.needs_trainer else 0
    engines = min(config.num_gpus_per_node if not config.colocate else ranks, config.reserved_rollout_gpus)
    if config.needs_trainer and not config.colocate:
        engines = min(config.num_gpus_per_node - ranks, engines)
    per_stage = config.world_size // config.pipeline_model_parallel_size
    nodes = [
        Counter(rank // per_stage for rank in range(node * ranks, (node + 1) * ranks))
        for node in range(config.actor_num_nodes if ranks else 0)
    ] or [Counter()]
    return max(
        (_node(config, model, work, trainers, stages, engines, engine) for stages in nodes),
        key=lambda host: max(host.totals.values()),
    )


def _node(
    config: RunConfig,
    model: Model,
    work: Work,
    trainers: dict[int, Device],
    stages: Counter[int],
    engines: int,
    engine: EngineBytes | None,
) -> Host:
    ranks, parties = sum(stages.values()), 2 if config.use_critic else 1
    item = model.traits.itemsize
    copies = config.needs_reference + (config.opd_teacher_load is not None) + config.keep_old_actor
    weights = sum(count * item * model.stages[stage].parameters for stage, count in stages.items())
    chunk = config.offload_train_disk_chunk_mb * 2**20
    chunks = (config.offload_train_target == "disk") + config.stream_optimizer_state_to_disk
    pinned = {
        column: sum(count * trainers[stage].walk.pinned.get(column, 0.0) for stage, count in stages.items())
        for column in Column
    }
    tokens = config.samples_per_rollout * work.longest if config.learns_from_samples else 0
    lasting = {
        "processes": DRIVER + parties * ranks * TRAINER_PROCESS + engines * ENGINE_PROCESS,
        "copies of weights (reference, teacher, old policy)": float(copies * weights),
        "staging for the disk": float(parties * ranks * chunk * chunks),
        "/dev/shm (Ray's batches)": float(tokens * BATCH_BYTES_PER_TOKEN),
    }
    memory = {name: dict.fromkeys(Column, size) for name, size in lasting.items() if size}
    memory["pinned: the sleeping trainer"] = pinned
    if config.save is not None and config.needs_trainer and not config.no_save_optim:
        # The first data-parallel rank gathers what it writes.
        share = sum(12 * model.stages[stage].parameters for stage in stages)
        memory["gathered for a checkpoint"] = {Column.SAVE: float(parties * share)}
    if config.sglang.get("enable_weights_cpu_backup") and config.offload_rollout and engine is not None:
        away = [column for column in Column if column not in (Column.ENGINES_UP, Column.GENERATE)]
        memory["copies of sleeping engines"] = dict.fromkeys(away, engines * engine.weights)
    streamed = 0.0
    if config.stream_optimizer_state_to_disk:
        each = 4 + 2 * moment_bytes(config) if config.bf16 else 2 * moment_bytes(config)
        streamed = sum(count * each * optimizer_share(config, model.stages[stage]) for stage, count in stages.items())
    disk = {
        "the sleeping trainer": sum(count * trainers[stage].walk.disk for stage, count in stages.items()),
        STREAMED: float(parties * streamed),
    }
    if config.save is not None:
        each = item + (0 if config.no_save_optim else 12)
        disk["one checkpoint of --save, all nodes"] = float(parties * model.parameters * each)
    if config.save_hf is not None:
        disk["one export of --save-hf"] = float(model.parameters * item)
    return Host(
        {name: values for name, values in memory.items() if any(values.values())},
        {name: size for name, size in disk.items() if size},
    )
