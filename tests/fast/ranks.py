"""What the ranks of `run_ranks` share."""

import gc


def leave_world() -> None:
    """Take down what `initialize` made of this process; the next run in it starts as in a new one.

    All ranks of the world call it together. What the run built must not be used afterwards.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    parallel_state.destroy_model_parallel()
    # The hooks of a model's gradients hold it from C++, where the collector does not look, and it holds its process
    # groups. Each of these has three threads, one of which wakes a hundred times a second.
    for found in gc.get_objects():
        if type(found) is DistributedDataParallel:
            vars(found).clear()
    gc.collect()
