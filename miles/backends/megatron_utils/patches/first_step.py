"""A distributed optimizer that never stepped can be saved, and saving it changes no weight.

megatron-core 0.19.2 asserts in `state_dict()` where there is no state yet, and the dummy step that is meant to make
some applies weight decay. Delete this once both are gone: tests/fast/backends/megatron_utils/test_checkpoint.py
resumes such a run.
"""

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_dummy_step = DistributedOptimizer._init_optimizer_states_with_dummy_values
_state_dict = DistributedOptimizer.state_dict


def install() -> None:
    """Replace both methods, any number of times."""
    DistributedOptimizer._init_optimizer_states_with_dummy_values = _fill_state
    DistributedOptimizer.state_dict = _filled_state_dict


def _fill_state(self) -> None:
    learning_rates = [group["lr"] for group in self.optimizer.param_groups]
    for group in self.optimizer.param_groups:
        group["lr"] = 0.0
    _dummy_step(self)
    for group, learning_rate in zip(self.optimizer.param_groups, learning_rates, strict=True):
        group["lr"] = learning_rate


def _filled_state_dict(self) -> dict:
    if not self.optimizer.state:
        self._init_optimizer_states_with_dummy_values()
    return _state_dict(self)
