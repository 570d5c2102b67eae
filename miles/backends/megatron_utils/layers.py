"""Layer parts for Megatron's local specification: RMSNorm, and attention with rotary positions over packed sequences.

Shapes: T tokens of all packed sequences, S sequences, L longest sequence, N heads, D head size, R its rotated part.
A micro-batch is one row of T tokens. Only attention knows where sequences begin: boundaries and positions travel to it
in `PackedSequences`, Megatron's own argument for this purpose, so that everything else sees a plain sequence.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule


@dataclass(eq=False)
class PackedSequences(PackedSeqParams):
    """Boundaries of the packed sequences of one micro-batch.

    Args:
        cu_seqlens_q: int32 [S + 1], where each sequence starts; the last entry is T.
        cos_T1R, sin_T1R: float32 [T, 1, R], of each token's rotary angles at its position in its own sequence.
        padded_index_SL: on a CPU, int64 [S, L] per group of sequences of like length: the token at each place of the
            group's padded layout (the first token of all where there is none).
        padded_place_T: on a CPU, int64 [T]: each token's place in the flattened padded layouts of all groups.
    """

    cos_T1R: torch.Tensor = None
    sin_T1R: torch.Tensor = None
    padded_index_SL: tuple[torch.Tensor, ...] = ()
    padded_place_T: torch.Tensor = None


def packed_sequences(
    cu_seqlens: torch.Tensor, position_ids_T: torch.Tensor, max_seqlen: int, rotary: RotaryEmbedding
) -> PackedSequences:
    """The boundaries of a micro-batch from int32 [S + 1] starts, int64 [T] positions and the longest length."""
    angles_T1R = rotary.get_emb(max_seqlen)[:, 0].index_select(0, position_ids_T)
    padded_index, padded_place = (), None
    if cu_seqlens.device.type == "cpu":
        padded_index, padded_place = _padded_layouts(cu_seqlens.long(), position_ids_T)
    return PackedSequences(
        qkv_format="sbhd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        cos_T1R=angles_T1R.cos(),
        sin_T1R=angles_T1R.sin(),
        padded_index_SL=padded_index,
        padded_place_T=padded_place,
    )


def _padded_layouts(
    starts_with_end: torch.Tensor, position_ids_T: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Group sequences by length (powers of two), so that padding at most doubles the work, and lay each group out."""
    starts, lengths = starts_with_end[:-1], starts_with_end.diff()
    groups = torch.ceil(torch.log2(lengths.double())).long()
    layouts, first_place, place = [], torch.empty_like(starts), 0
    for group in groups.unique().tolist():
        members = (groups == group).nonzero().flatten()
        longest = int(lengths[members].max())
        offsets = torch.arange(longest)
        layouts.append(torch.where(offsets < lengths[members, None], starts[members, None] + offsets, 0))
        first_place[members] = place + torch.arange(len(members)) * longest
        place += len(members) * longest
    return tuple(layouts), torch.repeat_interleave(first_place, lengths) + position_ids_T


class RMSNorm(torch.nn.Module):
    """Root mean square normalisation (Zhang & Sennrich 2019, eq. 4); allows sequence parallelism in a local spec."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-6, **_):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _Rotate(torch.autograd.Function):
    """Rotary position embedding (Su et al. 2021, eq. 34, halves instead of pairs), computed in float32.

    As the engine does it, in whatever type the model runs. A rotation's gradient is the rotation back, so nothing but
    the angles is kept.
    """

    @staticmethod
    def forward(ctx, x_TND, cos_T1R, sin_T1R):
        ctx.save_for_backward(cos_T1R, sin_T1R)
        return _rotated(x_TND, cos_T1R, sin_T1R)

    @staticmethod
    def backward(ctx, grad_TND):
        cos_T1R, sin_T1R = ctx.saved_tensors
        return _rotated(grad_TND, cos_T1R, -sin_T1R), None, None


def _rotated(x_TND: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor) -> torch.Tensor:
    size = cos_T1R.shape[-1]
    x_TNR = x_TND[..., :size].float()
    first, second = x_TNR.chunk(2, dim=-1)
    rotated = (x_TNR * cos_T1R + torch.cat((-second, first), dim=-1) * sin_T1R).to(x_TND.dtype)
    return rotated if size == x_TND.shape[-1] else torch.cat((rotated, x_TND[..., size:]), dim=-1)


class PackedAttention(MegatronModule):
    """Rotary positions, then causal attention within each packed sequence; grouped queries allowed.

    On a GPU torch's variable-length flash attention, on a CPU one scaled-dot-product call over the padded layout.
    """

    def __init__(
        self,
        config,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection=None,
    ):
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self" and not config.attention_dropout
        self.scale = softmax_scale

    def forward(
        self, query, key, value, attention_mask, *, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ) -> torch.Tensor:
        """query [T, 1, N, D], key and value [T, 1, N_kv, D] -> [T, 1, N * D]."""
        packed = packed_seq_params
        query, key = (_Rotate.apply(x.squeeze(1), packed.cos_T1R, packed.sin_T1R) for x in (query, key))
        attend = self._varlen if query.is_cuda else self._padded
        return attend(query, key, value.squeeze(1), packed).flatten(1).unsqueeze(1)

    def _padded(self, query, key, value, packed: PackedSequences) -> torch.Tensor:
        outputs = []
        for index_SL in packed.padded_index_SL:
            # [T, N, D] -> [S, N, L, D]; padding lies behind each sequence, where causal attention never looks.
            q, k, v = (x[index_SL].transpose(1, 2) for x in (query, key, value))
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            outputs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)[packed.padded_place_T]

    def _varlen(self, query, key, value, packed: PackedSequences) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(
            query,
            key,
            value,
            packed.cu_seqlens_q,
            packed.cu_seqlens_kv,
            packed.max_seqlen_q,
            packed.max_seqlen_kv,
            scale=self.scale,
            window_size=(-1, 0),
        )
