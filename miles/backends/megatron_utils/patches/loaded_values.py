"""State of a distributed optimizer can be loaded into torch's AdamW.

megatron-core 0.19.2 raises KeyError "step" there, or writes in place into a leaf that requires a gradient. Delete
this once a run with the distributed optimizer resumes without it
(tests/fast/backends/megatron_utils/test_checkpoint.py).
"""

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def install() -> None:
    """Replace the method, any number of times."""
    DistributedOptimizer._set_main_param_and_optimizer_states = _set_main_param_and_optimizer_states


def _set_main_param_and_optimizer_states(self, model_param, tensors) -> None:
    group, index = self.model_param_group_index_map[model_param]
    main_param = self.optimizer.param_groups[group]["params"][index]
    destination = {"param": main_param, **self.optimizer.state[main_param]}
    with torch.no_grad():
        for name, value in tensors.items():
            if name != "step" and name in destination:
                destination[name].copy_(value)
