"""Memory that allocators keep for later."""

import torch


def empty_caches(device: torch.device) -> None:
    """Give the allocators' cached blocks back, on the GPU and of pinned host memory."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
