"""Numbers of a shard's tokens, of which each context-parallel rank has some."""

import torch
import torch.distributed as dist


def combined(values: torch.Tensor, group: dist.ProcessGroup, device: torch.device | str) -> torch.Tensor:
    """Numbers of which each rank of `group` has some and NaN for the others, complete on every rank, on the CPU.

    device: what the group communicates through. NaN stays where no rank has the number, or two do.
    """
    if group.size() == 1:
        return values
    known = ~values.isnan()
    sums = torch.stack((torch.where(known, values, 0.0), known.to(values.dtype))).to(device)
    dist.all_reduce(sums, group=group)
    return torch.where(sums[1] == 1, sums[0], torch.nan).cpu()
