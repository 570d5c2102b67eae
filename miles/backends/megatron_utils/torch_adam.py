"""torch's AdamW inside Megatron's optimizers: how it is chosen, found, filled and reset.

Megatron would take Transformer Engine's or Apex's where one is installed; the moves of optimizer state between devices,
host and disk are written for torch's, whose fused kernel is as fast.
"""

import megatron.core.optimizer
import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer


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


def install() -> None:
    """Let Megatron build torch's AdamW, any number of times; before an optimizer is built."""
    megatron.core.optimizer.Adam = torch.optim.AdamW
    megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = True
