"""After a load every parameter counts its own steps, and the kernel is this machine's.

megatron-core 0.19.2 gives all parameters of a loaded distributed optimizer one `step` tensor, which then advances
once a parameter instead of once a step, silently; and it takes the choice of the kernel from the run that saved.
Delete this once `load_state_dict` does neither: tests/fast/backends/megatron_utils/test_megatron_flags.py looks at
both.
"""

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from miles.backends.megatron_utils.torch_adam import step_device

_load_state_dict = DistributedOptimizer.load_state_dict


def install() -> None:
    """Replace the method, any number of times."""
    DistributedOptimizer.load_state_dict = _load


def _load(self, state_dict: dict) -> None:
    kernels = [(group["fused"], group["foreach"]) for group in self.optimizer.param_groups]
    _load_state_dict(self, state_dict)
    for group, (fused, foreach) in zip(self.optimizer.param_groups, kernels, strict=True):
        group["fused"], group["foreach"] = fused, foreach
        for parameter in group["params"]:
            state = self.optimizer.state[parameter]
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].detach().to(step_device(group, parameter), torch.float32, copy=True)
