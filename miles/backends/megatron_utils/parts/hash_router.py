"""A router whose experts are fixed for each token id (DeepSeek-V4's first layers); how much each gives is learned."""

import copy

import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from miles.backends.trainer import side_input


class HashRouter(TopKRouter):
    """It has no selection bias, for nothing is selected, and no balance of load to learn."""

    def __init__(self, config: TransformerConfig, *args, vocab_size: int, **kwargs):
        config = copy.copy(config)
        config.moe_router_enable_expert_bias = False
        super().__init__(config, *args, **kwargs)
        # Megatron updates the biases of all modules that have the attribute, be it none.
        del self.expert_bias
        self.register_buffer("expert_of_token", torch.zeros(vocab_size, self.topk, dtype=torch.int64))

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and choice of experts, [T, experts] each, of this rank's tokens in the running micro-batch."""
        logits_TX, tokens_T = logits.view(-1, self.config.num_moe_experts), side_input.micro_batch().tokens_T
        if self.config.sequence_parallel:
            tokens_T = tokens_T.chunk(self.tp_group.size())[self.tp_group.rank()]
        return topk_routing_with_score_function(
            self.apply_z_loss(logits_TX),
            self.topk,
            scaling_factor=self.config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            precomputed_indices=self.expert_of_token[tokens_T],
        )
