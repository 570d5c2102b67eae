"""How evenly a step's tokens were shared out among the experts, and the selection bias that evens them out.

Shape letters: L layers with experts of this rank, E all experts.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from miles.backends.megatron_utils.parts.expert_layer import ExpertLayer


class ExpertLoad:
    """Counts of a step, over all micro-batches and all ranks that hold the same layers. Padding is not counted.

    Args:
        chunks: this stage's models.
    """

    def __init__(self, chunks: list[torch.nn.Module]):
        self._layers = [part for chunk in chunks for part in chunk.modules() if isinstance(part, ExpertLayer)]

    def begin_step(self) -> None:
        """Start to count anew."""
        for layer in self._layers:
            layer.tokens_E.zero_()

    def end_passes(self) -> dict[str, float]:
        """Bring the counts of the ranks together; all ranks call it, once a step, when its passes are done.

        Returns:
            train/moe/load_max and load_min: tokens of the busiest and of the idlest expert of any layer, as a multiple
            of what each would have if all had the same; train/moe/unused: the share of all layers' experts that had
            none. {} for a model whose layers are all dense.
        """
        device = torch.device(torch.cuda.current_device())
        extremes, sums = torch.full((2,), -torch.inf, device=device), torch.zeros(2, device=device)
        if self._layers:
            counts_LE = torch.stack([layer.tokens_E for layer in self._layers])
            dist.all_reduce(
                counts_LE, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
            )
            for layer, counts_E in zip(self._layers, counts_LE, strict=True):
                layer.tokens_E.copy_(counts_E)
            load_LE = counts_LE / counts_LE.float().mean(dim=1, keepdim=True).clamp(min=1e-9)
            extremes = torch.stack([load_LE.max(), -load_LE.min()])
            sums = torch.tensor([0.0, counts_LE.numel()], device=device)
            sums[0] = (counts_LE == 0).sum()
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
            dist.all_reduce(sums, group=group)
        (most, least), (unused, experts) = extremes.tolist(), sums.tolist()
        if not experts:
            return {}
        return {"train/moe/load_max": most, "train/moe/load_min": -least, "train/moe/unused": unused / experts}

    @torch.no_grad()
    def move_biases(self, rate: float) -> None:
        """Move each expert's selection bias by `rate` towards an even load, by the counts of `end_passes`.

        Up where an expert had fewer tokens than the mean, down where it had more (Wang et al. 2024, "Auxiliary-loss-
        free load balancing strategy for mixture-of-experts"; DeepSeek-V3, section 2.1.2).
        """
        for layer in self._layers:
            bias_E = getattr(layer.router, "expert_bias", None)  # a router that selects nothing has none
            if bias_E is not None:
                counts_E = layer.tokens_E.float()
                bias_E += rate * torch.sign(counts_E.mean() - counts_E)
