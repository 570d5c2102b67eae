"""Megatron's layer of experts with our order of rows: sorted by expert once, counts stay on the device.

Shape letters: T tokens of this rank, E all experts, N rows, H channels.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from miles.backends.megatron_utils.parts.rows import RowOrder
from miles.backends.trainer import side_input


class ExpertLayer(MoELayer):
    """Megatron's, with `RowDispatcher` for all but --moe-token-dispatcher-type allgather over several ranks.

    Attributes:
        tokens_E: int64, of this rank's tokens those that went to each of all experts, in passes with gradients and
            until somebody zeroes it. Padding is not counted.
    """

    tokens_E: torch.Tensor

    def __init__(self, *args: Any, pg_collection: Any = None, **kwargs: Any):
        groups = pg_collection or get_default_pg_collection()
        super().__init__(*args, pg_collection=groups, **kwargs)
        counts_E = torch.zeros(self.config.num_moe_experts, dtype=torch.int64, device=torch.cuda.current_device())
        self.register_buffer("tokens_E", counts_E, persistent=False)
        if self.config.moe_token_dispatcher_type == "alltoall" or groups.tp_ep.size() == 1:
            self.token_dispatcher = RowDispatcher(
                self.num_local_experts, self.local_expert_indices, config=self.config, pg_collection=groups
            )
            if self.shared_expert_overlap:
                self.token_dispatcher.set_shared_experts(self.shared_experts)

    def route(
        self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities and choice of experts, [T, E] each."""
        probs_TE, chosen_TE = super().route(hidden_states, padding_mask)
        # Where layers are recomputed, their first pass has no gradients.
        if torch.is_grad_enabled():
            real_T = side_input.micro_batch().real_T
            if self.config.sequence_parallel:
                real_T = real_T.chunk(self.attn_tp_group.size())[self.attn_tp_group.rank()]
            self.tokens_E += (chosen_TE & real_T[:, None]).sum(dim=0)
        return probs_TE, chosen_TE


class RowDispatcher(MoEAlltoAllTokenDispatcher):
    """Tokens to experts and back. Several ranks exchange rows as Megatron's does; only their numbers go to the host.

    The steps have Megatron's names, and are called once each, in order, in a pass over the layer.
    """

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Counts of rows, as Megatron's; those on the device are kept."""
        self.device_counts: torch.Tensor = super().preprocess(routing_map)
        # Rows of each local expert, of each rank they come from.
        chunks = self.num_global_tokens_per_local_expert if self.num_local_experts > 1 else None
        self.device_chunks: torch.Tensor | None = chunks
        return self.device_counts

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
        if self.ep_size * self.tp_size == 1:
            return tokens_per_expert
        return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [..., H] and probabilities [T, E] to rows [N, H] by expert, and their probabilities [N]."""
        self.hidden_shape, self.probs_dtype = hidden_states.shape, probs.dtype
        tokens_TH = hidden_states.view(-1, self.hidden_shape[-1])
        self.tokens_per_expert = self.preprocess(routing_map)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", self.tokens_per_expert)
        self.order: RowOrder | None = RowOrder.by_expert(routing_map, self.config.moe_router_topk)
        return self.order.to_rows(tokens_TH), self.order.probs(probs)

    def dispatch_postprocess(
        self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows that have arrived, sorted by local expert; their counts, on the device; their probabilities."""
        rows_NH, probs_N = global_input_tokens, global_probs
        if self.tp_size > 1:
            sizes = self.output_splits_tp.tolist()
            rows_NH, probs_N = (
                gather_from_sequence_parallel_region(x, group=self.tp_group, output_split_sizes=sizes)
                for x in (rows_NH, probs_N)
            )
        self.arrival: RowOrder | None = None
        if self.device_chunks is not None and self.ep_size * self.tp_size > 1:
            chunks = self.device_chunks.to(rows_NH.device)
            experts = torch.arange(self.num_local_experts, device=rows_NH.device).repeat(len(chunks))
            self.arrival = RowOrder.by_key(experts.repeat_interleave(chunks.ravel(), output_size=len(rows_NH)))
            rows_NH = self.arrival.to_rows(rows_NH)
            probs_N = self.arrival.to_rows(probs_N)
        return rows_NH, self.device_counts, probs_N

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The experts' outputs in the order in which their rows have arrived."""
        if self.arrival is not None:
            hidden_states = self.arrival.to_tokens(hidden_states)
        if self.tp_size > 1:
            sizes, dtype = self.output_splits_tp.tolist(), hidden_states.dtype
            hidden_states = reduce_scatter_to_sequence_parallel_region(
                hidden_states.to(self.probs_dtype), group=self.tp_group, input_split_sizes=sizes
            ).to(dtype)
        return hidden_states

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        """Rows [N, H] summed to tokens, in the shape they had, and the shared experts' output if it is ready."""
        assert self.order is not None
        output = self.order.to_tokens(permutated_local_input_tokens).view(self.hidden_shape)
        self.order = self.arrival = None  # their memory goes with the graph's
        return output if self.shared_experts is None else output + self.shared_experts.get_output()
