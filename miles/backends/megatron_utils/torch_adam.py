"""Makes torch's AdamW the optimizer inside Megatron's, and cures the distributed optimizer's faults with it.

Megatron would take Transformer Engine's or Apex's where one is installed; the moves of optimizer state between devices,
host and disk are written for torch's, whose fused kernel is as fast. In megatron-core 0.19.2 the distributed optimizer
has four faults, each silent or fatal on resume:

* after a load every parameter shares one `step` tensor, which then advances once a parameter instead of once a step;
* loading fails with KeyError "step", or writes in place into a leaf that requires grad;
* of a buffer with several buckets it saves other values than it has, silently;
* `state_dict()` of an optimizer that never stepped asserts, and the dummy step meant to fill it applies weight decay.
"""

import functools

import megatron.core.optimizer
import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, clip_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import local_multi_tensor_applier


def megatron_optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The parts of a chained optimizer, or the optimizer itself."""
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def inner_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """The torch optimizers that do the work inside Megatron's; a part without parameters has none."""
    return [part.optimizer for part in megatron_optimizers(optimizer) if part.optimizer is not None]


def fuse(optimizer: MegatronOptimizer) -> None:
    """Update parameters in one kernel that reads and writes everything once; call before the first step or load."""
    for inner in inner_optimizers(optimizer):
        for group in inner.param_groups:
            group["fused"], group["foreach"] = True, False


def fill_state(optimizer: torch.optim.Optimizer, moment: str) -> None:
    """Make the zeros of a moment (`exp_avg` or `exp_avg_sq`) where Adam would at its first step; keep what is there."""
    assert isinstance(optimizer, torch.optim.Adam)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if "step" not in state:
                state["step"] = torch.tensor(0.0, device=step_device(group, parameter))
            if moment not in state:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def fill_states(optimizer: MegatronOptimizer) -> None:
    """Make the zeros with which Adam would begin its first step, where there are none yet."""
    for inner in inner_optimizers(optimizer):
        for moment in ("exp_avg", "exp_avg_sq"):
            fill_state(inner, moment)


@torch.no_grad()
def reset_states(optimizer: MegatronOptimizer) -> None:
    """Zero moments and step counters in place: the next step is that of a freshly built optimizer."""
    for inner in inner_optimizers(optimizer):
        for state in inner.state.values():
            for name in ("step", "exp_avg", "exp_avg_sq"):
                state[name].zero_()


def step_device(group: dict, parameter: torch.Tensor) -> torch.device | str:
    """Where torch keeps a parameter's count of steps."""
    return parameter.device if group["fused"] else "cpu"


def _set_main_param_and_optimizer_states(self, model_param, tensors) -> None:
    group, index = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group]["params"][index]
    destination = {"param": main_param, **self.optimizer.state[main_param]}
    with torch.no_grad():
        for name, value in tensors.items():
            if name != "step" and name in destination:
                destination[name].copy_(value)


def _foreach_norm(_chunk_size, _overflow, tensor_lists, _per_tensor) -> tuple[torch.Tensor, None]:
    """Norm of all tensors together, [1]."""
    return torch.nn.utils.get_total_norm(tensor_lists[0], foreach=True)[None], None


def _foreach_scale(_chunk_size, _overflow, tensor_lists, scale: float) -> None:
    """Clipping, in place."""
    sources, targets = tensor_lists
    assert all(source.data_ptr() == target.data_ptr() for source, target in zip(sources, targets, strict=True))
    torch._foreach_mul_(targets, scale)


def _install_norms() -> None:
    """Norm and clipping in a few kernels; Megatron's own loop waits for the GPU after each parameter.

    Transformer Engine's, which it takes where that is installed, would return the norm as a tensor.
    """
    clip_grads.multi_tensor_applier = local_multi_tensor_applier
    clip_grads.l2_norm_impl = _foreach_norm
    clip_grads.multi_tensor_scale_impl = _foreach_scale
    clip_grads.multi_tensor_scale_tensor_impl = None


def _at_places_in_buffers(optimizer: DistributedOptimizer, state: dict | None) -> dict | None:
    """Put the state that Megatron gathers for a checkpoint where its buffer's index says that each parameter is.

    Megatron lays the buckets end to end without the padding between them, and reads with it: of all buckets but the
    first of a buffer (tied embeddings under pipeline parallelism have one of their own) it would save other values.
    """
    if state is None:
        return None
    for number, buffer in enumerate(optimizer.buffers):
        if len(buffer.buckets) == 1:
            continue
        for tensors in state[number].values():
            for name in tensors.keys() - {"numel_unpadded"}:
                packed, whole = tensors[name], tensors[name].new_zeros(buffer.numel)
                parts = packed.split([bucket.numel_unpadded for bucket in buffer.buckets])
                for bucket, part in zip(buffer.buckets, parts, strict=True):
                    whole[bucket.offset : bucket.offset + len(part)] = part
                tensors[name] = whole
    return state


_original_gather = DistributedOptimizer.get_parameter_state_dp_zero


def _gather_state(self, *args, **kwargs):
    return _at_places_in_buffers(self, _original_gather(self, *args, **kwargs))


@functools.cache
def install() -> None:
    """Choose torch's AdamW and replace five methods of DistributedOptimizer. Call before an optimizer is built."""
    if torch.cuda.is_available():
        _install_norms()
    megatron.core.optimizer.Adam = torch.optim.AdamW
    megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = True
    original_load = DistributedOptimizer.load_state_dict
    original_state = DistributedOptimizer.state_dict
    original_dummy = DistributedOptimizer._init_optimizer_states_with_dummy_values

    def load_state_dict(self, state_dict):
        kernels = [(group["fused"], group["foreach"]) for group in self.optimizer.param_groups]
        original_load(self, state_dict)
        # The kernel is this machine's choice, not that of the one that saved.
        for group, (fused, foreach) in zip(self.optimizer.param_groups, kernels, strict=True):
            group["fused"], group["foreach"] = fused, foreach
            for parameter in group["params"]:
                state = self.optimizer.state[parameter]
                if torch.is_tensor(state.get("step")):
                    step = state["step"].detach().to(step_device(group, parameter), torch.float32, copy=True)
                    state["step"] = step

    def fill_state(self):
        learning_rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        original_dummy(self)
        for group, learning_rate in zip(self.optimizer.param_groups, learning_rates, strict=True):
            group["lr"] = learning_rate

    def state_dict(self):
        if not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return original_state(self)

    DistributedOptimizer.get_parameter_state_dp_zero = _gather_state
    DistributedOptimizer._set_main_param_and_optimizer_states = _set_main_param_and_optimizer_states
    DistributedOptimizer.load_state_dict = load_state_dict
    DistributedOptimizer._init_optimizer_states_with_dummy_values = fill_state
    DistributedOptimizer.state_dict = state_dict
