"""How Megatron computes: layers, recomputation, communication, experts. Names as in Megatron-LM."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from miles.config.effect import OnlyWith
from miles.config.names import flag_of
from miles.config.section import Derived, Section, derives, rule
from miles.config.values import Values
from miles.hf.families import shape_of
from miles.hf.shape import model_shape

# GiB on a GPU of what a DeepSeek-V4 keeps without recomputation: a tenth of the smallest that it is trained on.
MOST_WIDE_STREAMS = 8
RecomputeModule = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]


class MegatronConfig(Section):
    title: ClassVar[str] = "Megatron"

    transformer_impl: Literal["local", "transformer_engine"] = Field(
        "local",
        description="Layers of Megatron and torch, or of Transformer Engine, which must be installed and needs a GPU.",
    )
    deterministic_mode: bool = Field(
        False,
        description="Compute with algorithms that give the same bits in each run, which takes longer: torch, NCCL and "
        "Transformer Engine are told so, and what can't be computed so ends the run. On a CPU it is so anyway.",
    )
    fp8_format: Literal["e4m3", "hybrid"] | None = Field(
        None, description="Compute linear layers in FP8, hybrid: gradients as e5m2. Unset: in the model's own type."
    )
    fp8_recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] = Field(
        "blockwise", description="How FP8 values are scaled; mxfp8 is for Blackwell, blockwise for Hopper."
    )
    bias_swiglu_fusion: bool | None = Field(
        None,
        description="Compile SwiGLU into one kernel. Unset: on with cuda. Only where a model has it; experts' always "
        "is on a GPU.",
    )
    # A chunk's float32 logits are 1.2 GB at a vocabulary of 151,936. Much smaller ones make the sum of the output
    # weight's gradient, which is read and written once a chunk, cost as much as the products themselves.
    log_probs_chunk_size: int = Field(
        2048, gt=0, description="Tokens whose logits exist at a time, in the forward and in the backward pass."
    )
    recompute_granularity: Literal["full", "selective"] | None = Field(
        None,
        description="Recompute activations in the backward pass: whole layers, or the --recompute-modules of each. "
        "Unset: keep all, but full for a DeepSeek-V4 whose residual streams would take more than 8 GiB.",
    )
    recompute_method: Annotated[Literal["uniform", "block"] | None, OnlyWith("--recompute-granularity full")] = Field(
        None,
        description="With full recomputation: keep only the input of every group of --recompute-num-layers layers, or "
        "recompute the first --recompute-num-layers of each pipeline stage one by one.",
    )
    recompute_num_layers: Annotated[int | None, OnlyWith("--recompute-granularity full")] = Field(
        None, gt=0, description="Layers, see --recompute-method."
    )
    recompute_modules: Annotated[list[RecomputeModule] | None, OnlyWith("--recompute-granularity selective")] = Field(
        None, description="What selective recomputation recomputes of each layer. Unset: core_attn."
    )
    accumulate_allreduce_grads_in_fp32: bool = Field(
        True, description="Add gradients up in fp32, over micro-batches and ranks, even if the model runs in bf16."
    )
    overlap_grad_reduce: bool = Field(
        False, description="Reduce gradients over the data-parallel ranks while the backward pass goes on."
    )
    overlap_param_gather: Annotated[bool, OnlyWith("--use-distributed-optimizer", "which gathers")] = Field(
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
    moe_router_load_balancing_type: Annotated[Literal["none", "aux_loss"], OnlyWith("--moe-aux-loss-coeff")] = Field(
        "none", description="Loss that evens out the load of experts, weighted by --moe-aux-loss-coeff."
    )
    moe_aux_loss_coeff: Annotated[float, OnlyWith("--moe-router-load-balancing-type aux_loss")] = Field(
        0.0, ge=0, description="Weight of the load-balancing loss."
    )
    moe_router_freeze_gate: bool = Field(
        False, description="Leave the weights and biases of the routers as they are; experts are trained."
    )
    moe_router_bias_update_rate: float = Field(
        0.0,
        ge=0,
        description="By how much each optimizer step moves the bias in the choice of an expert, up where it had fewer "
        "tokens than the mean of its layer, else down (DeepSeek-V3). 0 keeps the checkpoint's.",
    )
    moe_z_loss_coeff: float | None = Field(
        None, gt=0, description="Weight of a loss on the size of the router's logits. Unset: none."
    )


@derives("bias_swiglu_fusion")
def _fusion(v: Values) -> Iterator[Derived]:
    if v.bias_swiglu_fusion is None:
        yield "bias_swiglu_fusion", v.device == "cuda", f"--device {v.device}"


@derives("recompute_granularity", "recompute_method", "recompute_num_layers")
def _wide_streams(v: Values) -> Iterator[Derived]:
    """Where kept streams would not fit, unless something is said of recomputation; a selective one keeps them."""
    said = (v.recompute_granularity, v.recompute_method, v.recompute_num_layers, v.recompute_modules)
    if any(value is not None for value in said):
        return
    fields = model_shape(v.hf_checkpoint)
    if fields is None or not v.needs_trainer:
        return
    kept = shape_of(fields).wide_stream_bytes()
    if not kept:
        return
    tokens = v.max_tokens_per_gpu if v.use_dynamic_batch_size else None
    if tokens is None:
        # Those of responses, the least that a micro-batch may have.
        tokens = v.micro_batch_size * (v.rollout_max_response_len or 0) / v.context_parallel_size
    # The first pipeline stage keeps as many micro-batches as there are stages: in all, one of all layers.
    size = kept * fields["num_hidden_layers"] * tokens / v.tensor_model_parallel_size / 2**30
    if size > MOST_WIDE_STREAMS:
        reason = f"{size:.0f} GiB of residual streams in float32 would be kept on a GPU otherwise"
        yield "recompute_granularity", "full", reason
        yield "recompute_method", "uniform", reason
        yield "recompute_num_layers", 1, reason


@rule
def _recompute(v: Values) -> Iterator[str]:
    if v.recompute_granularity == "full":
        for name, values in (
            ("recompute_method", "uniform or block"),
            ("recompute_num_layers", "a number of layers, 1 for example"),
        ):
            if getattr(v, name) is None:
                yield f"--recompute-granularity full needs {flag_of(name)}: give {values}"
    # Megatron discards their output, and restores it, through Transformer Engine.
    bound = [name for name in v.recompute_modules or [] if name in ("layernorm", "mla_up_proj")]
    if bound and v.recompute_granularity == "selective" and v.transformer_impl == "local":
        yield (
            f"--recompute-modules {' '.join(bound)} needs --transformer-impl transformer_engine, it is local; drop "
            f"{' and '.join(bound)}"
        )


@rule
def _overlap(v: Values) -> Iterator[str]:
    if not v.overlap_param_gather:
        return
    if v.use_distributed_optimizer and not v.overlap_grad_reduce:
        yield "--overlap-param-gather needs --overlap-grad-reduce too; add it"
    if v.stream_optimizer_state_to_disk:
        yield (
            "--overlap-param-gather is not possible with --stream-optimizer-state-to-disk, whose step gathers weights "
            "itself; drop one of them"
        )


@rule
def _transformer_engine(v: Values) -> Iterator[str]:
    if v.transformer_impl == "transformer_engine" and v.device == "cpu":
        yield "--transformer-impl transformer_engine needs a GPU and --device is cpu; use --transformer-impl local"
    elif v.transformer_impl == "transformer_engine" and not v.bf16:
        yield "--transformer-impl transformer_engine has fused attention in bfloat16 only; add --bf16, or use local"
    if v.fp8_format is not None and v.transformer_impl == "local":
        yield f"--fp8-format {v.fp8_format} needs --transformer-impl transformer_engine, it is local; add that"
    if v.fp8_format is not None and v.data_pad_size_multiplier % 16:
        # Products in FP8 take tokens in multiples of 8, their gradients of 16.
        yield (
            f"--fp8-format {v.fp8_format} needs micro-batches of a multiple of 16 tokens: --data-pad-size-multiplier "
            f"{v.data_pad_size_multiplier} is none; choose 16, or the default of 128"
        )


@rule
def _token_dispatcher(v: Values) -> Iterator[str]:
    if v.moe_token_dispatcher_type == "allgather" and v.sharers_of_experts > v.tensor_model_parallel_size:
        yield (
            f"--moe-token-dispatcher-type allgather needs the same number of tokens on all {v.sharers_of_experts} "
            f"ranks that share a layer's experts, but only {v.tensor_model_parallel_size} of them have the same "
            "samples (--tensor-model-parallel-size); use alltoall"
        )
    if v.moe_token_dispatcher_type == "allgather" and v.pipeline_model_parallel_size > 1:
        yield (
            "--moe-token-dispatcher-type allgather needs micro-batches of one length between pipeline stages, which "
            f"packed ones have not (--pipeline-model-parallel-size {v.pipeline_model_parallel_size}); use alltoall"
        )
