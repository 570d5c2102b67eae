"""The critic's model: that of the actor, with a value head in the place of the output layer.

Shapes: T tokens of a micro-batch (T / tp under sequence parallelism), N response tokens, H hidden size.
"""

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from miles.backends.megatron_utils.logits import ScoringContext
from miles.backends.megatron_utils.parts.marks import mark


class ValueHead(torch.nn.Module):
    """From a hidden state to a value, whole on every tensor-parallel rank. It starts at zero: so does every value.

    Args:
        config: of the model that it belongs to.
        device: where the weights are.
    """

    def __init__(self, config: TransformerConfig, device: torch.device):
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype, device=device))
        for parameter in self.parameters():
            # Each rank then sees its own part of the tokens: Megatron adds up such gradients.
            mark(parameter, sequence_parallel=config.sequence_parallel)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H] to float32 [...]: a value in half precision would have two or three digits."""
        return F.linear(hidden.float(), self.weight.float(), self.bias.float())[..., 0]


def replace_heads(chunks: list[GPTModel]) -> None:
    """Put a value head on the last pipeline stage's model, and forget that the output layer was the embedding."""
    for model in chunks:
        model.share_embeddings_and_output_weights = False
        if model.post_process:
            model.output_layer = ValueHead(model.config, next(model.parameters()).device)


def score_values(*, hidden_states, output_layer: ValueHead, context: ScoringContext, **_) -> tuple[torch.Tensor]:
    """GPTModel's `output_processor`: the value before each response token, float32 [N].

    That is what the hidden state knows which predicts the token. Under sequence parallelism each rank computes the
    values of its tokens, and they are gathered: every rank then has the loss of all, so gradients are only cut.
    """
    index_N = context.packed.logit_index_N
    if not output_layer.sequence_parallel:
        return (output_layer(hidden_states[:, 0].index_select(0, index_N)),)
    group = parallel_state.get_tensor_model_parallel_group()
    values_T = gather_from_sequence_parallel_region(
        output_layer(hidden_states[:, 0]), tensor_parallel_output_grad=False, group=group
    )
    return (values_T.index_select(0, index_N),)
