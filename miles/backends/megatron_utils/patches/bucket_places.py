"""Optimizer state of a buffer with several buckets is saved as it is.

megatron-core 0.19.2 lays a buffer's buckets end to end without the padding between them when it gathers the
distributed optimizer's state for a checkpoint, and reads that with the padding: of all buckets but the first (tied
embeddings under pipeline parallelism have one of their own) it saves other values, silently. Delete this once
`get_parameter_state_dp_zero` gives each parameter's state at its place in the buffer:
tests/fast/backends/megatron_utils/test_expert_state.py resumes such a run.
"""

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_gather = DistributedOptimizer.get_parameter_state_dp_zero


def install() -> None:
    """Replace the method, any number of times."""
    DistributedOptimizer.get_parameter_state_dp_zero = _gather_state


def _gather_state(self, *args, **kwargs) -> dict | None:
    return at_places_in_buffers(self, _gather(self, *args, **kwargs))


def at_places_in_buffers(optimizer: DistributedOptimizer, state: dict | None) -> dict | None:
    """Put the state that Megatron gathers where its buffer's index says that each parameter is."""
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
