"""Where the memory of one trainer rank is: its regions, their moves, and reading weights that are away.

| region | holds | when it leaves |
| --- | --- | --- |
| comm | process groups that need not stay | destroyed, built anew on waking |
| grads | the gradients | dropped, zeroed on waking |
| weights | the parameters | copied out, or dropped and rebuilt from the masters |
| optimizer | masters and Adam's moments | copied out |
"""

import gc
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from miles.backends.trainer.protocol import TAGS, TrainedModel
from miles.config import RunConfig
from miles.config.residency import policy_of
from miles.residency.disk_store import DiskStore
from miles.residency.fingerprint import fingerprint
from miles.residency.host_store import HostStore, Store
from miles.residency.memory import DeviceMemory, device_memory, span
from miles.residency.plan import Move, Party, Place, Policy, Region, back, start, trainer_leaves, trainer_returns
from miles.residency.state import ResidencyError
from miles.utils.host_memory import resident_bytes
from miles.utils.units import GB
from miles.weight_sync.source import live, part_shape

logger = logging.getLogger(__name__)

_MOVING = "moving a trainer rank's memory"
# More than this left on the GPU by a sleeping rank is worth a warning.
RESIDUAL_BOUND_BYTES = 512 * 2**20
# So much more than usual in tensors outside the regions is worth a search for cycles of garbage, which takes 0.3 s.
GARBAGE_BOUND_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Moved:
    """A move that was made: its seconds, and the bytes it copied."""

    move: Move
    seconds: float
    copied: int


class TrainerResidency:
    """The regions of one rank, and their moves as the planner has them.

    A move that is made is not made again: a repeated call finishes what an earlier failure left.

    Built once the model holds its weights and a checkpoint is loaded: parameters, masters, moments and gradients then
    move into regions of their own, and keep their identity from then on.

    Args:
        party: who this rank trains: actor or critic.
        policy: what moves where.
        model: what this rank trains.
        memory: the device memory to hold the regions.
        store: where contents go.
        check: hash every tensor before a sleep and compare after the wake.
    """

    def __init__(
        self,
        party: Party,
        policy: Policy,
        model: TrainedModel,
        memory: DeviceMemory,
        store: Store,
        check: bool,
    ):
        self.party, self.policy, self.model = party, policy, model
        self.memory, self.store, self.groups = memory, store, model.groups
        self.device = torch.device(model.config.device)
        self.places = {region: place for (owner, region), place in start(policy).items() if owner is party}
        self.buffers = model.build_regions(memory)
        self.masters = model.master_weights(self.read) if policy.rematerialize else None
        self.moved: list[Moved] = []  # by the last call
        self._agreements = 0  # still to come in the running call
        self._usual_outside = 0  # bytes of tensors outside the regions that no collection could remove
        self._check = check
        self._fingerprints: dict[str, int] = {}

    # Verbs: each says what shall move, and the planner how.

    @property
    def asleep(self) -> bool:
        """Whether anything that training needs is away."""
        return bool(self._pending(trainer_returns(self.party, self.policy)))

    def sleep(self) -> dict[str, float]:
        """Leave the GPU, but for process groups that the weight sync needs; returns metrics, {} when asleep."""
        return self.move(trainer_leaves(self.party, self.policy))

    def wake_up(self) -> dict[str, float]:
        """Come back to the GPU; returns metrics, {} when awake."""
        return self.move(trainer_returns(self.party, self.policy))

    def offload_grad_buffer(self) -> dict[str, float]:
        """Drop the gradients ahead of the sleep."""
        leaves = trainer_leaves(self.party, self.policy)
        return self.move([move for move in leaves if move.region is Region.GRADS])

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Within it the trainer is awake; what was away goes there again afterwards.

        Not so after a failure: it would wait for ranks that may not come, and its cause would not be heard.
        """
        returns = self._pending(trainer_returns(self.party, self.policy))
        self.move(returns)
        yield
        self.move(back(returns))

    # Reading

    def read_weight(self, parameter: torch.Tensor, expert: int | None = None) -> torch.Tensor:
        """The values of a parameter or a buffer of the model, or one expert's part, on the device, wherever they are.

        Don't write to them.
        With rematerialisation all data-parallel ranks must call it together while the weights are away.
        """
        if isinstance(parameter, torch.nn.Parameter) and self.places[Region.WEIGHTS] is Place.DROPPED:
            assert self.masters is not None
            return self.masters.read(parameter, expert)
        return self.read(parameter, expert).to(self.device, non_blocking=True)

    def read(self, tensor: torch.Tensor, expert: int | None = None) -> torch.Tensor:
        """The values of a weight (or one expert's part), master or moment: itself on the GPU, else on the host.

        Don't write to them.
        """
        for region, buffers in self.buffers.items():
            for index, buffer in enumerate(buffers):
                inside = span(buffer, tensor)
                if inside is not None:
                    return self._read(region, index, tensor, expert, *inside)
        return live(tensor, expert)

    def _read(
        self, region: Region, index: int, tensor: torch.Tensor, expert: int | None, offset: int, nbytes: int
    ) -> torch.Tensor:
        if self.places[region] is Place.GPU:
            return live(tensor, expert)
        if self.places[region] is not self.store.place:
            raise ResidencyError(f"{self.party} {region} is {self.places[region]}: it can't be read")
        if expert is not None:
            nbytes //= len(tensor)
            offset += expert * nbytes
        value = self.store.read(_key(region, index), offset, nbytes)
        return value.view(tensor.dtype).view(part_shape(tensor, expert))

    # Moves

    def move(self, moves: Sequence[Move]) -> dict[str, float]:
        """Make `moves`, all in one direction, in order, but for those that are made already.

        Returns:
            Metrics: seconds and bytes copied of a sleep or a wake (perf/sleep_*, perf/wake_up_*), seconds of process
            groups (perf/destroy_process_groups_time, perf/reload_process_groups_time). {} where nothing was left to do.

        Raises:
            ResidencyError: a region is at neither end of its move.
        """
        pending = self._pending(moves)
        if not pending:
            return {}
        with self._telling(pending):
            if not any(move.region in (Region.WEIGHTS, Region.OPTIMIZER) for move in pending):
                return self._make(pending)
            return self._sleep(pending) if pending[0].leaves else self._wake(pending)

    def _pending(self, moves: Sequence[Move]) -> list[Move]:
        return [move for move in moves if self.places[move.region] is not move.target]

    def _sleep(self, moves: list[Move]) -> dict[str, float]:
        # A streamed optimizer has no buffers: it is never on the GPU.
        hashed = [region for region in (Region.WEIGHTS, Region.OPTIMIZER) if self.buffers[region]]
        if self._check and all(self.places[region] is Place.GPU for region in hashed):
            self._fingerprints = self.hash_everything()
        started = time.perf_counter()
        self.model.drop_workspaces()
        empty_caches(self.device)
        metrics = self._make(moves)
        if self._outside_bytes() > self._usual_outside + GARBAGE_BOUND_BYTES:
            gc.collect()
            self._usual_outside = self._outside_bytes()
        empty_caches(self.device)
        metrics["perf/sleep_bytes"] = float(sum(moved.copied for moved in self.moved))
        metrics["perf/sleep_time"] = time.perf_counter() - started
        return metrics | self._left_behind()

    def _wake(self, moves: list[Move]) -> dict[str, float]:
        started = time.perf_counter()
        empty_caches(self.device)
        metrics = self._make(moves)
        for region, buffers in self.buffers.items():
            for index in range(len(buffers)):
                self.store.discard(_key(region, index))
        metrics["perf/wake_up_bytes"] = float(sum(moved.copied for moved in self.moved))
        metrics["perf/wake_up_time"] = time.perf_counter() - started
        if self._check and self._fingerprints:
            self._compare(self.hash_everything())
            self.groups.verify()
        return metrics

    def _make(self, moves: list[Move]) -> dict[str, float]:
        """Make the moves in order; returns the seconds that the groups took."""
        self.moved = []
        for move in moves:
            self.moved.append(self._move(move))
        verb = "destroy" if moves[0].leaves else "reload"
        groups = [moved.seconds for moved in self.moved if moved.move.region is Region.COMM]
        return {f"perf/{verb}_process_groups_time": seconds for seconds in groups}

    @contextmanager
    def _telling(self, moves: list[Move]) -> Iterator[None]:
        """A rank that fails within it tells the others before they wait for it in a move that all make together."""
        self._agreements = sum(map(self._is_collective, moves))
        try:
            yield
        except Exception as error:
            if self._agreements:
                self.groups.agreement.check(_MOVING, error)
            raise

    def _move(self, move: Move) -> Moved:
        """One move. A failed one leaves the region where it was.

        Contents are copied before memory goes, and kept until it is back: nothing is lost. Groups may be half built,
        and building them again finishes that.
        """
        started, place = time.perf_counter(), self.places[move.region]
        if place is not move.source:
            way = f"from {move.source} to {move.target}"
            raise ResidencyError(f"{self.party} {move.region} is {place}: it can't move {way}")
        copied = self._leave(move) if move.leaves else self._return(move)
        self.places[move.region] = move.target
        moved = Moved(move, time.perf_counter() - started, copied)
        logger.debug("%s", moved)
        return moved

    def _leave(self, move: Move) -> int:
        if move.region is Region.COMM:
            if self._is_collective(move):
                self._agree()
            self.groups.destroy()
            return 0
        copied = 0
        if move.target is not Place.DROPPED:
            for index, buffer in enumerate(self.buffers[move.region]):
                self.store.save(_key(move.region, index), buffer)
                copied += buffer.numel()
        released = self.memory.release(TAGS[move.region])
        assert copied in (0, released), f"{copied} bytes of {move.region} were copied, {released} released"
        return copied

    def _return(self, move: Move) -> int:
        if move.region is Region.COMM:
            self._agree()
            self.groups.rebuild()
            return 0
        self.memory.restore(TAGS[move.region])
        copied = 0
        try:
            for index, buffer in enumerate(self.buffers[move.region]):
                if move.source is not Place.DROPPED:
                    self.store.load(_key(move.region, index), buffer)
                    copied += buffer.numel()
                elif move.region is Region.GRADS:
                    buffer.zero_()
            if move.region is Region.WEIGHTS and move.source is Place.DROPPED:
                self._agree()
                assert self.masters is not None
                self.masters.rebuild()
        except Exception:
            self.memory.release(TAGS[move.region])
            raise
        return copied

    def _is_collective(self, move: Move) -> bool:
        """Whether all ranks make it together: groups, and weights that are rebuilt from every rank's masters.

        Not so the end of a `destroy` that failed on this rank alone.
        """
        if move.region is Region.COMM:
            return not move.leaves or self.groups.alive
        return move.region is Region.WEIGHTS and move.source is Place.DROPPED

    def _agree(self) -> None:
        """Ahead of what all ranks do together: raise where another rank did not come this far."""
        left, self._agreements = self._agreements - 1, 0  # who fails at this one is not waited for at the next
        self.groups.agreement.check(_MOVING)
        self._agreements = left

    # Reports

    def _left_behind(self) -> dict[str, float]:
        """Host memory after a sleep, and what this rank still holds on the GPU, by pool."""
        host = resident_bytes()
        metrics = {"perf/cpu_memory_after_offload_train_gb": host / GB}
        if self.device.type != "cuda":
            return metrics
        tensors = self._outside_bytes()
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if tensors + cached > RESIDUAL_BOUND_BYTES:
            logger.warning(
                "the sleeping trainer still holds %.2f GB of tensors outside its regions and %.2f GB of cached blocks "
                "on the GPU", tensors / GB, cached / GB,
            )  # fmt: skip
        return metrics | {"perf/gpu_residual_tensors_gb": tensors / GB, "perf/gpu_residual_cache_gb": cached / GB}

    def _outside_bytes(self) -> int:
        """Bytes of live tensors on the GPU outside the regions."""
        if self.device.type != "cuda":
            return 0
        # The allocator counts the regions' memory as in use, mapped or not.
        inside = sum(buffer.numel() for buffers in self.buffers.values() for buffer in buffers)
        return max(0, torch.cuda.memory_allocated() - inside)

    def hash_everything(self) -> dict[str, int]:
        """A fingerprint of every tensor that must survive a sleep, and of the random states."""
        tensors = self.model.lasting_tensors()
        tensors["random state"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["random state of the GPU"] = torch.cuda.get_rng_state()
        return {name: fingerprint(tensor.detach()) for name, tensor in tensors.items()}

    def _compare(self, after: dict[str, int]) -> None:
        before = self._fingerprints
        changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
        if changed:
            raise RuntimeError(
                f"--check-residency: {len(changed)} of {len(before)} tensors are not after the wake what they were "
                f"before the sleep: {', '.join(sorted(changed)[:8])}"
            )
        self._fingerprints = {}
        logger.info("--check-residency: %d tensors are bit-equal after the wake", len(after))


def build_residency(config: RunConfig, rank: int, model: TrainedModel, party: Party) -> TrainerResidency:
    """The residency of a rank that is built and loaded. Raises ValueError for a disk folder that can't be used."""
    policy = policy_of(config)
    pinned = config.device == "cuda"
    store: Store
    if policy.target is Place.DISK:
        assert config.offload_train_disk_dir is not None
        chunk = config.offload_train_disk_chunk_mb * 2**20
        store = DiskStore(config.offload_train_disk_dir, chunk, pinned, name=f"{party} rank {rank}")
    else:
        assert config.offload_train_keep_host_buffers is not None
        store = HostStore(pinned, config.offload_train_keep_host_buffers, policy.less_on_the_host())
    memory = device_memory(config.device, config.train_memory_margin_bytes, policy.more_room_on_the_gpu())
    return TrainerResidency(party, policy, model, memory, store, check=config.check_residency)


def _key(region: Region, index: int) -> str:
    return f"{region}.{index}"


def empty_caches(device: torch.device) -> None:
    """Give the allocators' cached blocks back, on the GPU and of pinned host memory."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
