"""Transformer Engine's linear layers and attention in the places of the local ones, for the layers of any family.

Norms stay ours, so that a model has the same parameters under the same names with either implementation: checkpoints,
loading and weight sync know nothing of it. Shapes: T tokens, N query heads, G key and value heads, D and E head sizes.
"""

import copy
import dataclasses
import functools
import importlib.util
import logging
import os
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from miles.backends.megatron_utils.parts.attention import PackedAttention
from miles.backends.megatron_utils.parts.experts import ExpertLinear, GroupedExperts
from miles.backends.megatron_utils.parts.grouped import Groups
from miles.backends.megatron_utils.parts.packed import PackedSequences
from miles.backends.megatron_utils.parts.rope import rotate
from miles.utils.errors import UserError

logger = logging.getLogger(__name__)

_CUDNN = (
    "Transformer Engine finds no fused attention here, most often because it loads the system's older cuDNN instead of "
    "torch's: set CUDNN_HOME to torch's (site-packages/nvidia/cudnn) and put its lib folder first in LD_LIBRARY_PATH, "
    "look with NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2, or use --transformer-impl local"
)


def require() -> None:
    """Check that Transformer Engine can be used. Raises ValueError where it can't, with what to do."""
    if importlib.util.find_spec("transformer_engine") is None:
        raise UserError(
            "--transformer-impl transformer_engine needs the package transformer-engine, which is not installed: pip "
            "install transformer-engine[pytorch], or use --transformer-impl local"
        )
    # Unfused attention takes memory by the square of a sequence's length: without it, no fused one is an error.
    os.environ["NVTE_UNFUSED_ATTN"] = "0"
    _check_attention()


@functools.cache
def _check_attention() -> None:
    query_TND = torch.zeros(64, 2, 64, dtype=torch.bfloat16, device="cuda")
    starts = torch.tensor([0, 32, 64], dtype=torch.int32, device="cuda")
    try:
        _dot_product_attention(2, 2, 64, 64, 0.125)(query_TND, query_TND, query_TND, **_boundaries(starts, 32))
    except ValueError as error:
        raise UserError(_CUDNN) from error
    logger.info("layers and attention through Transformer Engine; norms through torch")


def replaced(spec: ModuleSpec, classes: dict[type, type] | None = None) -> ModuleSpec:
    """A layer's specification with `classes` replaced wherever they stand, subclasses not.

    By default the local linear layers and attention by Transformer Engine's. A family's own linear layers (of sandwich
    norms, for example), routers, embedding and head stay as they are.
    """
    return _replace(spec, _classes() if classes is None else classes)


def _replace(part: Any, classes: dict[type, type]) -> Any:
    if isinstance(part, type):
        return classes.get(part, part)
    if isinstance(part, functools.partial):
        keywords = {name: _replace(value, classes) for name, value in part.keywords.items()}
        return functools.partial(_replace(part.func, classes), *part.args, **keywords)
    if isinstance(part, ModuleSpec):
        return dataclasses.replace(
            part, module=_replace(part.module, classes), submodules=_replace(part.submodules, classes)
        )
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
        return dataclasses.replace(part, **{name: _replace(value, classes) for name, value in fields.items()})
    return part


@functools.cache
def _classes() -> dict[type, type]:
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

    def accumulating(config):
        # Its products add to the gradient in fp32 themselves; what the local layers need for that is Apex.
        config = copy.copy(config)
        config.gradient_accumulation_fusion = True
        return config

    class Column(TEColumnParallelLinear):
        def __init__(self, *args, config, **kwargs):
            super().__init__(*args, config=accumulating(config), **kwargs)

    class Row(TERowParallelLinear):
        def __init__(self, *args, config, **kwargs):
            super().__init__(*args, config=accumulating(config), **kwargs)

    return {
        ColumnParallelLinear: Column,
        RowParallelLinear: Row,
        PackedAttention: EngineAttention,
        GroupedExperts: EngineExperts,
    }


class EngineExpertLinear(ExpertLinear):
    """In FP8 through Transformer Engine's GroupedLinear; in bf16 as `ExpertLinear`, which waits for no counts.

    GroupedLinear takes one weight an expert: it is lent views of the one parameter, and has none itself.
    """

    def __init__(self, experts: int, outputs: int, inputs: int, cut: int, config: TransformerConfig):
        super().__init__(experts, outputs, inputs, cut, config)
        self._engine: dict[str, Any] = {}  # not modules of this one: they have no state
        if config.fp8 is not None:
            from transformer_engine.pytorch import Fp8Padding, Fp8Unpadding, GroupedLinear

            linear = GroupedLinear(
                experts, inputs, outputs, bias=False, params_dtype=config.params_dtype, device="meta"
            )
            for expert in range(experts):
                del linear._parameters[f"weight{expert}"]
            self._engine = {"linear": linear, "pad": Fp8Padding(experts), "unpad": Fp8Unpadding(experts)}

    def forward(self, x_TI: torch.Tensor, groups: Groups) -> torch.Tensor:
        """See `ExpertLinear`. FP8 products take rows by 16 or 32: each expert's are filled up with zeros."""
        if not self._engine or not groups.rows:
            return super().forward(x_TI, groups)
        linear = self._engine["linear"]
        for expert, weight_OI in enumerate(self.weight.unbind(0)):
            setattr(linear, f"weight{expert}", weight_OI)
        padded_TI, sizes = self._engine["pad"](x_TI, groups.sizes)
        y_TO = linear(padded_TI, sizes)
        for expert in range(len(self.weight)):
            delattr(linear, f"weight{expert}")
        return self._engine["unpad"](y_TO, groups.sizes)


class EngineExperts(GroupedExperts):
    """Experts with Transformer Engine's products."""

    linear_class = EngineExpertLinear


class EngineAttention(PackedAttention):
    """Plain causal attention through Transformer Engine; with windows, sinks and the like as in `PackedAttention`."""

    def forward(
        self, query, key, value, attention_mask, *, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ) -> torch.Tensor:
        """query [T, 1, N, D], key [T, 1, G, D], value [T, 1, G, E] -> [T, 1, N * E]."""
        if not self._is_plain(packed_seq_params):
            return super().forward(query, key, value, attention_mask, packed_seq_params=packed_seq_params)
        query_TND, key_TGD, value_TGE = (x.squeeze(1) for x in (query, key, value))
        if self.options.rope is not None:
            angles = packed_seq_params.angles[self.options.rope]
            query_TND, key_TGD = (rotate(x, *angles) for x in (query_TND, key_TGD))
        (heads, size), (groups, value_size) = query_TND.shape[1:], value_TGE.shape[1:]
        scale = size**-0.5 if self.scale is None else self.scale
        attention = _dot_product_attention(heads, groups, size, value_size, scale)
        bounds = _boundaries(packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q)
        return attention(query_TND, key_TGD, value_TGE.contiguous(), **bounds).unsqueeze(1)

    def _is_plain(self, packed: PackedSequences) -> bool:
        options = self.options
        sees_all = options.window is None or options.window >= packed.max_seqlen_q
        special = options.chunk or options.softcap or options.sinks or options.temperature
        return sees_all and not special and packed.cp_group is None


@functools.cache
def _dot_product_attention(heads: int, groups: int, size: int, value_size: int, scale: float):
    """It has no parameters: one for all layers of these shapes."""
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(
        num_attention_heads=heads,
        kv_channels=(size, value_size),
        num_gqa_groups=groups,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        softmax_scale=scale,
    )


def _boundaries(cu_seqlens: torch.Tensor, longest: int) -> dict[str, Any]:
    return dict(
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        qkv_format="thd",
        attn_mask_type="padding_causal",
    )
