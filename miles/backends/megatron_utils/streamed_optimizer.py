"""Keeps fp32 masters and Adam moments on a node-local disk, within the optimizer step too.

It takes over two methods of Megatron's DistributedOptimizer: `step_with_ready_grads` runs AdamW over one bucket after
the other (miles/backends/megatron_utils/streamed_state.py) and writes the new weights into the parameter buffer;
`sharded_state_dict` reads the state from the disk. Gradient norm, clipping and the gather of the parameters stay
Megatron's.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.optim.adamw import adamw

from miles.backends.megatron_utils.model import TrainState
from miles.backends.megatron_utils.streamed_state import NEIGHBOURS, Bucket, StateFile, decode
from miles.backends.megatron_utils.torch_adam import megatron_optimizers, step_device
from miles.residency.disk_store import round_up
from miles.utils.agreement import Agreement
from miles.utils.errors import UserError, one_line

_UNFINISHED = (
    "an optimizer step failed midway on this or another rank: the optimizer state on disk is of two steps and can't be "
    "used or saved: restart the run from its last checkpoint"
)


@dataclass(frozen=True, eq=False)
class _Shard:
    """This rank's part of one parameter; its state lies at `start` of the file's positions."""

    model_param: torch.nn.Parameter
    main_param: torch.Tensor  # what the optimizer updates: fp32, flat; a view of the parameter if that is fp32 itself
    has_master: bool
    group: int
    start: int

    @property
    def end(self) -> int:
        return self.start + self.main_param.numel()


@dataclass(frozen=True)
class _Part:
    """What of a shard lies in one bucket."""

    shard: _Shard
    in_bucket: slice
    in_shard: slice

    def gradient(self) -> torch.Tensor:
        """Its part of the shard's, which every shard has before a step."""
        gradient = self.shard.main_param.grad
        assert gradient is not None
        return gradient[self.in_shard]


class StreamedOptimizer:
    """Moves the optimizer state of `state` to disk, frees its memory, and takes the optimizer's steps from there.

    Build it once a checkpoint has been loaded: loading into it is refused. All ranks step together. With fp32 moments
    every step is bit-identical to the optimizer's own.

    Args:
        state: its optimizer must be one DistributedOptimizer with torch's AdamW.
        folder: on a node-local disk; each rank makes a file without a name in it.
        chunk_bytes: host memory for staging. On a GPU a third of it is used there too, during a step.
        moment_dtype: format of the moments on disk; Adam computes in fp32.
        pinned: whether the staging memory is pinned.
        agreement: of all ranks.

    Raises:
        ValueError: another optimizer, a chunk too small, a folder in memory, or a disk too full.
    """

    def __init__(
        self,
        state: TrainState,
        folder: str,
        chunk_bytes: int,
        moment_dtype: torch.dtype,
        pinned: bool,
        agreement: Agreement,
    ):
        self._agreement = agreement
        self._optimizer = _distributed_optimizer(state.optimizer)
        self._inner = self._optimizer.optimizer
        self._device = next(state.models[0].parameters()).device
        self._shards = _shards(self._optimizer)
        self._folder = folder
        self._problem: str | None = None
        self._readable = False
        self._moments_are_zero = False  # whatever the file says: they are overwritten in the next step
        self._file = StateFile(
            folder,
            elements=max([1, *(shard.end for shard in self._shards)]),
            masters=any(shard.has_master for shard in self._shards),
            moment_dtype=moment_dtype,
            chunk_bytes=chunk_bytes,
            pinned=pinned,
        )
        self._parts = _parts(self._shards, self._file.buckets, self._file.bucket_elements)
        self._file.stream(self._take_over)
        for shard in self._shards:
            # Before the first step torch has no state; that of the file is zeros.
            if not self._inner.state[shard.main_param]:
                empty = {name: torch.empty(0, device=self._device) for name in ("exp_avg", "exp_avg_sq")}
                self._inner.state[shard.main_param] = {"step": torch.tensor(0.0), **empty}
            # Read once a bucket.
            self._inner.state[shard.main_param]["step"] = self._inner.state[shard.main_param]["step"].cpu()
            self._hide(shard)
        self._original_sharded_state_dict = self._optimizer.sharded_state_dict
        self._optimizer.step_with_ready_grads = self._step_with_ready_grads
        self._optimizer.sharded_state_dict = self._sharded_state_dict

    def reset_states(self) -> None:
        """Zero moments and step counters: the next step is that of a freshly built optimizer. Touches no file."""
        self._moments_are_zero = True
        for shard in self._shards:
            self._inner.state[shard.main_param]["step"].zero_()

    @contextlib.contextmanager
    def materialised(self) -> Iterator[None]:
        """Within it masters and moments can be read, as host tensors; changes to them are lost.

        They are pages of the file; moments of a narrow format are in host memory, in fp32. Saving a checkpoint enters
        it by itself.

        Raises:
            RuntimeError: a step failed midway.
        """
        self._check()
        whole = self._file.mapped()
        self._readable = True
        try:
            for shard in self._shards:
                self._show(shard, whole)
            yield
        finally:
            for shard in self._shards:
                self._hide(shard)
            self._readable = False

    def _check(self) -> None:
        if self._problem is not None:
            raise RuntimeError(self._problem)

    @torch.no_grad()
    def _step_with_ready_grads(self) -> bool:
        self._check()
        assert not self._readable, "no step while the state is materialised"
        # Until all buckets are written, on all ranks.
        self._problem = _UNFINISHED
        # A rank that waits in the gather for one that failed would not say why.
        with self._agreement.alone("an optimizer step"):
            try:
                self._file.stream(self._updates())
            except Exception as error:
                self._problem = f"{_UNFINISHED} ({self._folder}: {one_line(error)})"
                raise RuntimeError(self._problem) from error
        for shard in self._shards:
            self._inner.state[shard.main_param]["step"] += 1
        self._moments_are_zero = False
        self._problem = None
        self._optimizer.start_param_sync_for_bucket_group_subset()
        return True

    def _updates(self) -> Callable[[int, torch.Tensor], Callable[[], object]]:
        """One step's update of a bucket. On a GPU all is in the order of one stream: the disk is what takes time."""
        if self._device.type == "cpu":

            def update(index: int, slot: torch.Tensor) -> Callable[[], object]:
                self._update(index, self._file.bucket(slot))
                return lambda: None

        else:
            on_device = torch.empty(self._file.slot_bytes, dtype=torch.uint8, device=self._device)

            def update(index: int, slot: torch.Tensor) -> Callable[[], object]:
                on_device.copy_(slot, non_blocking=True)
                self._update(index, self._file.bucket(on_device))
                slot.copy_(on_device, non_blocking=True)
                done = torch.cuda.Event()
                done.record()
                return done.synchronize

        return update

    def _update(self, index: int, bucket: Bucket) -> None:
        """torch's AdamW over the bucket, then the new values into the parameter buffer."""
        exp_avg, exp_avg_sq = bucket.moments()
        if self._moments_are_zero:
            exp_avg.zero_()
            exp_avg_sq.zero_()
        for number, group in enumerate(self._inner.param_groups):
            parts = [part for part in self._parts[index] if part.shard.group == number]
            if not parts:
                continue
            values = [
                bucket.masters_at(part.in_bucket)
                if part.shard.has_master
                else part.shard.main_param.detach()[part.in_shard]
                for part in parts
            ]
            beta1, beta2 = group["betas"]
            adamw(
                values,
                [part.gradient() for part in parts],
                [exp_avg[part.in_bucket] for part in parts],
                [exp_avg_sq[part.in_bucket] for part in parts],
                [],
                # Copies: a shard in several parts has one count, which advances at the end.
                [
                    self._inner.state[part.shard.main_param]["step"].to(
                        step_device(group, part.shard.main_param), copy=True
                    )
                    for part in parts
                ],
                foreach=group["foreach"],
                capturable=group["capturable"],
                differentiable=group["differentiable"],
                fused=group["fused"],
                amsgrad=group["amsgrad"],
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
            )
            for part, value in zip(parts, values, strict=True):
                self._in_parameter_buffer(part.shard)[part.in_shard].copy_(value)
        bucket.store_moments(exp_avg, exp_avg_sq, self._steps_taken(), index * self._file.bucket_elements)

    def _take_over(self, index: int, slot: torch.Tensor) -> Callable[[], object]:
        """The state as it was before, into a bucket of the new file."""
        bucket = self._file.bucket(slot)
        exp_avg, exp_avg_sq = bucket.moments()
        for part in self._parts[index]:
            if part.shard.has_master:
                bucket.masters_at(part.in_bucket).copy_(part.shard.main_param[part.in_shard])
            state = self._inner.state[part.shard.main_param]
            if state:
                exp_avg[part.in_bucket].copy_(state["exp_avg"][part.in_shard])
                exp_avg_sq[part.in_bucket].copy_(state["exp_avg_sq"][part.in_shard])
        bucket.store_moments(exp_avg, exp_avg_sq, self._steps_taken(), index * self._file.bucket_elements)
        return lambda: None

    def _steps_taken(self) -> int:
        """Adam's count, which all shards share: the seed of a step's rounding."""
        state = self._inner.state[self._shards[0].main_param] if self._shards else {}
        return int(state["step"]) if state else 0

    def _in_parameter_buffer(self, shard: _Shard) -> torch.Tensor:
        """Where the gather takes the shard's new values from, flat. As DistributedOptimizer finds it."""
        buffer, _, bucket = self._optimizer.model_param_gbuf_map[shard.model_param]
        place = self._optimizer._get_model_param_range_map(shard.model_param)["gbuf_world_in_bucket"]
        return self._optimizer.buffers[buffer].buckets[bucket].param_data.view(-1)[place.start : place.end]

    def _sharded_state_dict(self, model_state: dict, is_loading: bool = False, *, metadata: dict) -> dict:
        assert not is_loading, "a checkpoint is loaded before the optimizer state goes to disk"
        # This format copies what it gathers: nothing of it reads the state later.
        assert metadata["distrib_optim_sharding_type"] == "fully_reshardable"
        with self.materialised():
            return self._original_sharded_state_dict(model_state, metadata=metadata)

    def _show(self, shard: _Shard, whole: Bucket) -> None:
        place, state = slice(shard.start, shard.end), self._inner.state[shard.main_param]
        if shard.has_master:
            shard.main_param.data = whole.masters_at(place)
        if self._moments_are_zero:
            state["exp_avg"].data = state["exp_avg_sq"].data = torch.zeros(()).expand(shard.main_param.shape)
            return
        if whole.exp_avg_scales is None or whole.exp_avg_sq_scales is None:
            state["exp_avg"].data, state["exp_avg_sq"].data = whole.exp_avg[place], whole.exp_avg_sq[place]
            return
        end = round_up(shard.end, NEIGHBOURS)
        scales, size = slice(shard.start // NEIGHBOURS, end // NEIGHBOURS), shard.main_param.numel()
        place = slice(shard.start, end)
        state["exp_avg"].data = decode(whole.exp_avg[place], whole.exp_avg_scales[scales], root=False)[:size]
        state["exp_avg_sq"].data = decode(whole.exp_avg_sq[place], whole.exp_avg_sq_scales[scales], root=True)[:size]

    def _hide(self, shard: _Shard) -> None:
        """Tensors of the same shape without memory. Reading one by mistake gives NaN, writing raises."""
        state = self._inner.state[shard.main_param]
        nothing = torch.full((), torch.nan, device=self._device).expand(shard.main_param.shape)
        for tensor in ([shard.main_param] if shard.has_master else []) + [state["exp_avg"], state["exp_avg_sq"]]:
            tensor.data = nothing


def _distributed_optimizer(optimizer: MegatronOptimizer) -> DistributedOptimizer:
    parts = megatron_optimizers(optimizer)
    if len(parts) != 1:
        raise UserError(
            f"--stream-optimizer-state-to-disk takes one optimizer and this model has {len(parts)} (experts over "
            "several ranks have their own): drop the flag"
        )
    (optimizer,) = parts
    if not isinstance(optimizer, DistributedOptimizer):
        raise UserError(
            f"--stream-optimizer-state-to-disk takes Megatron's distributed optimizer, not {type(optimizer).__name__}: "
            "drop --no-use-distributed-optimizer"
        )
    assert type(optimizer.optimizer) is torch.optim.AdamW, type(optimizer.optimizer)
    assert not optimizer.ddp_config.overlap_param_gather and not optimizer.ddp_config.fp8_param_gather
    assert not optimizer.config.use_precision_aware_optimizer
    assert not any(group["amsgrad"] for group in optimizer.optimizer.param_groups)
    return optimizer


def _shards(optimizer: DistributedOptimizer) -> list[_Shard]:
    shards: list[_Shard] = []
    for has_master, model_groups, main_groups in (
        (True, optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (False, optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    ):
        for group, (model_params, main_params) in enumerate(zip(model_groups, main_groups, strict=True)):
            for model_param, main_param in zip(model_params, main_params, strict=True):
                start = round_up(shards[-1].end, NEIGHBOURS) if shards else 0
                shards.append(_Shard(model_param, main_param, has_master, group, start))
    owned = [param for group in optimizer.optimizer.param_groups for param in group["params"]]
    assert {id(shard.main_param) for shard in shards} == {id(param) for param in owned} and len(shards) == len(owned)
    return shards


def _parts(shards: list[_Shard], buckets: int, bucket_elements: int) -> list[list[_Part]]:
    parts: list[list[_Part]] = [[] for _ in range(buckets)]
    for shard in shards:
        for index in range(shard.start // bucket_elements, -(-shard.end // bucket_elements)):
            origin = index * bucket_elements
            start, end = max(shard.start, origin), min(shard.end, origin + bucket_elements)
            in_bucket, in_shard = slice(start - origin, end - origin), slice(start - shard.start, end - shard.start)
            parts[index].append(_Part(shard, in_bucket, in_shard))
    return parts
