"""Hyper-connections with a doubly stochastic mix of the streams (mHC): a layer reads from several residual streams.

Shapes: T tokens (this rank's part under sequence parallelism), C streams, H hidden size. Streams are laid side by side,
[T, 1, C * H], also between pipeline stages, which tell each other the shapes of what they send. They have the model's
type; what is computed of them is in float32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_layer import TransformerLayer

from miles.backends.megatron_utils.parts.compressed_config import CompressedConfig
from miles.backends.megatron_utils.parts.norms import RMSNorm
from miles.backends.megatron_utils.parts.packed import PackedSequences


class HyperConnection(torch.nn.Module):
    """How one sublayer mixes, from the streams themselves.

    Of a token's C (2 + C) numbers C say how much it reads of each stream, C how much it writes to each, and C x C what
    goes from stream to stream.
    """

    def __init__(self, config: CompressedConfig):
        super().__init__()
        self.config = config
        count = config.hyper_streams
        self.weight = _parameter(config, count * (2 + count), count * config.hidden_size)
        self.base, self.scale = _parameter(config, count * (2 + count)), _parameter(config, 3)

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, 1, C * H] -> what the sublayer reads [T, 1, H], and what `write` takes beside its output."""
        config, count = self.config, self.config.hyper_streams
        sizes = [count, count, count * count]
        # One copy in float32 for all that is computed of them: going back needs it.
        wide = streams.float()
        numbers = _projected(wide, self.weight, config.layernorm_epsilon).split(sizes, dim=-1)
        read, written, across = (
            x * scale + base for x, scale, base in zip(numbers, self.scale, self.base.split(sizes), strict=True)
        )
        logits = across.unflatten(-1, (count, count))
        across = _Sinkhorn.apply(logits, config.hyper_iterations, config.hyper_epsilon)
        read = weighted_sum(wide, torch.sigmoid(read) + config.hyper_epsilon).to(streams.dtype)
        return read, wide, 2.0 * torch.sigmoid(written), across


class HyperHead(torch.nn.Module):
    """The streams become one, which is normed: in the place of the final norm."""

    def __init__(self, config: CompressedConfig, hidden_size: int, eps: float = 1e-6, **_):
        super().__init__()
        self.config = config
        self.head_weight = _parameter(config, config.hyper_streams, config.hyper_streams * hidden_size)
        self.head_base, self.head_scale = _parameter(config, config.hyper_streams), _parameter(config, 1)
        self.norm = RMSNorm(config, hidden_size, eps=eps)

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """[T, 1, C * H] -> [T, 1, H]."""
        wide = streams.float()
        logits = _projected(wide, self.head_weight, self.config.layernorm_epsilon)
        read = torch.sigmoid(logits * self.head_scale + self.head_base) + self.config.hyper_epsilon
        return self.norm(weighted_sum(wide, read).to(streams.dtype))


class HyperLayer(TransformerLayer):
    """A decoder layer whose two sublayers read from the streams and write to them; the first layer makes them."""

    def __init__(self, config: CompressedConfig, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.attention_hyper, self.mlp_hyper = HyperConnection(config), HyperConnection(config)

    def forward(
        self, hidden_states: torch.Tensor, *_, packed_seq_params: PackedSequences, **__
    ) -> tuple[torch.Tensor, None]:
        """[T, 1, C * H], or [T, 1, H] into the model's first layer -> [T, 1, C * H], and no context."""
        streams = hidden_states
        if self.layer_number == 1:
            streams = streams.repeat(1, 1, self.config.hyper_streams)
        x, *mix = self.attention_hyper(streams)
        output, _ = self.self_attention(self.input_layernorm(x), packed_seq_params=packed_seq_params)
        x, *mix = self.mlp_hyper(write(output, *mix).to(streams.dtype))
        output, _ = self.mlp(self.pre_mlp_layernorm(x))
        return write(output, *mix).to(streams.dtype), None


def weighted_sum(streams: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float32 [T, 1, C * H] and [T, 1, C] -> [T, 1, H]."""
    return (weight[..., None, :] @ streams.unflatten(-1, (weight.shape[-1], -1))).squeeze(-2)


def write(output: torch.Tensor, streams: torch.Tensor, share: torch.Tensor, across: torch.Tensor) -> torch.Tensor:
    """Each stream becomes a mix of all, by the columns of `across`, and gets its share of the sublayer's output.

    Args:
        output: [T, 1, H], in the model's type.
        streams: float32 [T, 1, C * H].
        share: float32 [T, 1, C].
        across: float32 [T, 1, C, C], from stream (row) to stream (column).

    Returns:
        The streams, float32 [T, 1, C * H].
    """
    mixed = across.mT @ streams.unflatten(-1, (share.shape[-1], -1)) + share[..., None] * output[..., None, :].float()
    return mixed.flatten(-2)


def _parameter(config: CompressedConfig, *shape: int) -> torch.nn.Parameter:
    parameter: Any = torch.nn.Parameter(torch.empty(*shape, dtype=torch.float32))
    parameter.sequence_parallel = config.sequence_parallel
    return parameter


def _projected(streams: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """All streams of a token, normed together, times the weight."""
    return F.linear(streams, weight) * torch.rsqrt(streams.square().mean(-1, keepdim=True) + epsilon)


def _sinkhorn(logits: torch.Tensor, iterations: int, epsilon: float) -> torch.Tensor:
    x = logits.softmax(dim=-1) + epsilon
    x = x / (x.sum(dim=-2, keepdim=True) + epsilon)
    for _ in range(iterations - 1):
        x = x / (x.sum(dim=-1, keepdim=True) + epsilon)
        x = x / (x.sum(dim=-2, keepdim=True) + epsilon)
    return x


class _Sinkhorn(torch.autograd.Function):
    """Rows and columns are made one in turn, columns last. Only the logits are kept for going back."""

    @staticmethod
    def forward(ctx, logits, iterations, epsilon):
        ctx.save_for_backward(logits)
        ctx.settings = iterations, epsilon
        return _sinkhorn(logits, iterations, epsilon)

    @staticmethod
    def backward(ctx, grad):
        (logits,) = ctx.saved_tensors
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            result = _sinkhorn(logits, *ctx.settings)
        return *torch.autograd.grad(result, logits, grad), None, None
