"""Cures for the distributed optimizer when its inner optimizer is torch's AdamW (no Transformer Engine, no Apex).

In megatron-core 0.19.2 it has three faults there, each silent or fatal on resume:

* after a load every parameter shares one `step` tensor, which then advances once a parameter instead of once a step;
* loading fails with KeyError "step", or writes in place into a leaf that requires grad;
* `state_dict()` of an optimizer that never stepped asserts, and the dummy step meant to fill it applies weight decay.
"""

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def megatron_optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The parts of a chained optimizer, or the optimizer itself."""
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def inner_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """The torch optimizers that do the work inside Megatron's."""
    return [part.optimizer for part in megatron_optimizers(optimizer)]


def fill_state(optimizer: torch.optim.Optimizer, moment: str) -> None:
    """Make the zeros of a moment (`exp_avg` or `exp_avg_sq`) where Adam would at its first step; keep what is there.

    Raises ValueError for another optimizer than torch's, which keeps its state in another way.
    """
    if not isinstance(optimizer, torch.optim.Adam):
        kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        raise ValueError(
            f"--offload-train moves the state of torch's AdamW, not of {kind}, which Megatron takes where Transformer "
            "Engine or Apex is installed: uninstall them, or pass --no-offload-train"
        )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if "step" not in state:
                state["step"] = torch.tensor(0.0)
            if moment not in state:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def _set_main_param_and_optimizer_states(self, model_param, tensors) -> None:
    group, index = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group]["params"][index]
    destination = {"param": main_param, **self.optimizer.state[main_param]}
    with torch.no_grad():
        for name, value in tensors.items():
            if name != "step" and name in destination:
                destination[name].copy_(value)


def install() -> None:
    """Replace the four methods of DistributedOptimizer; call once a process, before an optimizer is built."""
    original_load = DistributedOptimizer.load_state_dict
    original_state = DistributedOptimizer.state_dict
    original_dummy = DistributedOptimizer._init_optimizer_states_with_dummy_values

    def load_state_dict(self, state_dict):
        original_load(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

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

    DistributedOptimizer._set_main_param_and_optimizer_states = _set_main_param_and_optimizer_states
    DistributedOptimizer.load_state_dict = load_state_dict
    DistributedOptimizer._init_optimizer_states_with_dummy_values = fill_state
    DistributedOptimizer.state_dict = state_dict
