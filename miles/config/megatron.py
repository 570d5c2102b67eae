"""How Megatron computes: layers, recomputation, communication, experts. Names as in Megatron-LM."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from miles.config.section import Derived, Section, derives
from miles.config.values import Values

RecomputeModule = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]


class MegatronConfig(Section):
    title: ClassVar[str] = "Megatron"

    transformer_impl: Literal["local", "transformer_engine"] = Field(
        "local",
        description="Layers of Megatron and torch, or of Transformer Engine, which must be installed and needs a GPU.",
    )
    fp8_format: Literal["e4m3", "hybrid"] | None = Field(
        None, description="Compute linear layers in FP8, hybrid: gradients as e5m2. Unset: in the model's own type."
    )
    fp8_recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] = Field(
        "blockwise", description="How FP8 values are scaled; mxfp8 is for Blackwell, blockwise for Hopper."
    )
    bias_swiglu_fusion: bool | None = Field(
        None,
        description="Compile SwiGLU into one kernel. Unset: on with cuda. Only where a model has it and no experts.",
    )
    # A chunk's float32 logits are 1.2 GB at a vocabulary of 151,936. Much smaller ones make the sum of the output
    # weight's gradient, which is read and written once a chunk, cost as much as the products themselves.
    log_probs_chunk_size: int = Field(
        2048, gt=0, description="Tokens whose logits exist at a time, in the forward and in the backward pass."
    )
    recompute_granularity: Literal["full", "selective"] | None = Field(
        None,
        description="Recompute activations in the backward pass: whole layers, or the --recompute-modules of each. "
        "Unset: keep all.",
    )
    recompute_method: Literal["uniform", "block"] | None = Field(
        None,
        description="With full recomputation: keep only the input of every group of --recompute-num-layers layers, or "
        "recompute the first --recompute-num-layers of each pipeline stage one by one.",
    )
    recompute_num_layers: int | None = Field(None, gt=0, description="Layers, see --recompute-method.")
    recompute_modules: list[RecomputeModule] | None = Field(
        None, description="What selective recomputation recomputes of each layer. Unset: core_attn."
    )
    accumulate_allreduce_grads_in_fp32: bool = Field(
        True, description="Add gradients up in fp32, over micro-batches and ranks, even if the model runs in bf16."
    )
    overlap_grad_reduce: bool = Field(
        False, description="Reduce gradients over the data-parallel ranks while the backward pass goes on."
    )
    overlap_param_gather: bool = Field(
        False, description="Gather the distributed optimizer's new weights while the next forward pass goes on."
    )
    ddp_bucket_size: int | None = Field(
        None,
        gt=0,
        description="Parameters whose gradients are reduced together when that overlaps. Unset: 40 million, or one "
        "million a data-parallel rank if that is more.",
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = Field(
        "alltoall", description="How tokens reach their experts on other ranks."
    )
    moe_router_dtype: Literal["fp32", "fp64"] = Field("fp32", description="Precision of the experts' scores.")
    moe_router_load_balancing_type: Literal["none", "aux_loss"] = Field(
        "none", description="Loss that evens out the load of experts, weighted by --moe-aux-loss-coeff."
    )
    moe_aux_loss_coeff: float = Field(0.0, ge=0, description="Weight of the load-balancing loss.")
    moe_z_loss_coeff: float | None = Field(
        None, gt=0, description="Weight of a loss on the size of the router's logits. Unset: none."
    )


@derives("bias_swiglu_fusion")
def _fusion(v: Values) -> Iterator[Derived]:
    if v.bias_swiglu_fusion is None:
        yield "bias_swiglu_fusion", v.device == "cuda", f"--device {v.device}"
