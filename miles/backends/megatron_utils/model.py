"""Builds the Megatron model, optimizer and schedule of one rank from a Hugging Face configuration."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from miles.backends.megatron_utils import torch_adam
from miles.backends.megatron_utils.families import family_for
from miles.backends.megatron_utils.parts import transformer_engine
from miles.backends.megatron_utils.patches import cpu_support
from miles.config import RunConfig
from miles.config.continued import settings_of
from miles.hf.parallel import ParallelInfo
from miles.hf.vocab import padded_vocab_size


@dataclass
class TrainState:
    """What one rank trains: its wrapped model, the optimizer and the learning-rate schedule (steps as units).

    Args:
        chunks: the model's parts on this pipeline stage, several where stages are interleaved.
        settings: those of optimizer and schedule, as a checkpoint keeps them.
    """

    chunks: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    settings: dict[str, Any]

    @property
    def models(self) -> list[GPTModel]:
        """The chunks, unwrapped."""
        return [chunk.module for chunk in self.chunks]


def transformer_config(config: RunConfig, hf_config) -> TransformerConfig:
    """Megatron's TransformerConfig of this checkpoint under the run's parallel sizes and precision."""
    family = family_for(hf_config)
    model = family.transformer_config(hf_config)
    sizes = config.parallel_sizes
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    on_cpu = config.device == "cpu"
    interleaved = config.num_layers_per_virtual_pipeline_stage is not None
    return family.config_class(
        **model,
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=sizes.pp,
        num_layers_in_first_pipeline_stage=config.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=config.decoder_last_pipeline_num_layers,
        virtual_pipeline_model_parallel_size=config.virtual_stages,
        context_parallel_size=sizes.cp,
        expert_model_parallel_size=sizes.ep,
        expert_tensor_parallel_size=sizes.etp,
        sequence_parallel=sizes.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=config.bf16,
        # The length of a packed micro-batch differs from one to the next.
        variable_seq_lengths=sizes.pp > 1,
        moe_token_dispatcher_type=config.moe_token_dispatcher_type,
        moe_router_load_balancing_type=config.moe_router_load_balancing_type,
        moe_aux_loss_coeff=config.moe_aux_loss_coeff,
        moe_z_loss_coeff=config.moe_z_loss_coeff,
        moe_router_dtype=config.moe_router_dtype,
        transformer_impl=config.transformer_impl,
        # Megatron's default would let Transformer Engine choose the unfused attention.
        attention_backend=AttnBackend.fused if config.transformer_impl == "transformer_engine" else AttnBackend.auto,
        fp8=config.fp8_format,
        fp8_recipe=config.fp8_recipe,
        recompute_granularity=config.recompute_granularity,
        recompute_method=config.recompute_method,
        recompute_num_layers=config.recompute_num_layers,
        recompute_modules=config.recompute_modules,
        # Losses arrive divided by the counts of the whole step: nothing may be averaged again.
        calculate_per_token_loss=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        deterministic_mode=config.deterministic_mode,
        use_cpu_initialization=on_cpu,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=config.bias_swiglu_fusion and _has_plain_swiglu(model),
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        # Interleaved stages of two ranks cannot tell a batch's messages to the next from those to the previous.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not on_cpu and not interleaved,
        batch_p2p_sync=not on_cpu,
    )


def _has_plain_swiglu(model: dict) -> bool:
    """Whether Megatron's fused SwiGLU computes what these fields of TransformerConfig describe."""
    changed = {"glu_linear_offset", "activation_func_clamp_value"} & model.keys()
    return model.get("activation_func") is F.silu and bool(model.get("gated_linear_unit")) and not changed


def block_spec(hf_config, megatron_config: TransformerConfig, layers: range) -> TransformerBlockSubmodules:
    """The global `layers` as their family specifies each, and the final norm."""
    family = family_for(hf_config)
    specs = [family.layer_spec(hf_config, megatron_config, layer) for layer in layers]
    if megatron_config.transformer_impl == "transformer_engine":
        transformer_engine.require()
        specs = [transformer_engine.replaced(spec) for spec in specs]
    return TransformerBlockSubmodules(specs, layer_norm=family.final_norm)


def chunk_layers(megatron_config: TransformerConfig) -> list[list[range]]:
    """The global layer indices of [pipeline stage][chunk of its model]."""
    return [
        [
            range(offset, offset + get_num_layers_to_build(megatron_config, vp_stage=chunk, pp_rank=stage))
            for chunk in range(megatron_config.virtual_pipeline_model_parallel_size or 1)
            for offset in (get_transformer_layer_offset(megatron_config, vp_stage=chunk, pp_rank=stage),)
        ]
        for stage in range(megatron_config.pipeline_model_parallel_size)
    ]


def parallel_info(megatron_config: TransformerConfig) -> ParallelInfo:
    """This rank's place among those that hold the model. Needs Megatron's process groups."""
    return ParallelInfo(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        tp_group=parallel_state.get_tensor_model_parallel_group,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pp_group=parallel_state.get_pipeline_model_parallel_group,
        chunk_layers=chunk_layers(megatron_config),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
        ep_group=parallel_state.get_expert_model_parallel_group,
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        etp_size=parallel_state.get_expert_tensor_parallel_world_size(),
        etp_group=parallel_state.get_expert_tensor_parallel_group,
    )


def build_model(config: RunConfig, hf_config) -> list[GPTModel]:
    """The chunks of this rank's part of the model, uninitialised: weights come from a checkpoint.

    Needs Megatron's process groups. Raises ValueError where the model cannot have the run's parallel sizes.
    """
    family_for(hf_config).check_layout(hf_config, config.parallel_sizes)
    megatron_config = transformer_config(config, hf_config)
    stage_layers = chunk_layers(megatron_config)[parallel_state.get_pipeline_model_parallel_rank()]
    interleaved = megatron_config.virtual_pipeline_model_parallel_size is not None
    return [
        _build_chunk(config, hf_config, megatron_config, layers, chunk if interleaved else None)
        for chunk, layers in enumerate(stage_layers)
    ]


def _build_chunk(
    config: RunConfig, hf_config, megatron_config: TransformerConfig, layers: range, chunk: int | None
) -> GPTModel:
    family = family_for(hf_config)
    kwargs = family.gpt_kwargs(hf_config)
    kwargs["vocab_size"] = padded_vocab_size(hf_config.vocab_size, config.tensor_model_parallel_size)
    model = GPTModel(
        config=megatron_config,
        transformer_layer_spec=block_spec(hf_config, megatron_config, layers),
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        parallel_output=True,
        # Our attention rotates queries and keys itself.
        position_embedding_type="none",
        vp_stage=chunk,
        **kwargs,
    )
    model.ropes = family.ropes(hf_config)
    # Where logits are capped, the family's `after_build` says so.
    model.logit_softcap = None
    family.after_build(hf_config, model)
    if config.moe_router_freeze_gate:
        for part in model.modules():
            if isinstance(part, Router):
                part.requires_grad_(False)
    return model.to(config.device)


def build_train_state(config: RunConfig, chunks: list[GPTModel], total_steps: int) -> TrainState:
    """Wrap the model for data parallelism and build its optimizer and schedule for `total_steps` optimizer steps.

    Call it once the weights are loaded: the optimizer's master copies are taken from them.
    """
    megatron_config = chunks[0].config
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.accumulate_allreduce_grads_in_fp32,
        use_distributed_optimizer=config.use_distributed_optimizer,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
        bucket_size=config.ddp_bucket_size,
    )
    wrapped = [DistributedDataParallel(megatron_config, ddp_config, chunk) for chunk in chunks]
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        bf16=config.bf16,
        params_dtype=megatron_config.params_dtype,
        use_distributed_optimizer=config.use_distributed_optimizer,
        overlap_param_gather=config.overlap_param_gather,
    )
    with cpu_support.cuda_type_names():
        optimizer = get_megatron_optimizer(optimizer_config, wrapped)
    if config.device == "cuda":
        torch_adam.fuse(optimizer)
    scheduler = _scheduler(config, optimizer, total_steps)
    # With calculate_per_token_loss Megatron hands a token count over to divide by; ours is in the loss already.
    megatron_config.finalize_model_grads_func = lambda chunks, _num_tokens, **kwargs: finalize_model_grads(
        chunks, None, **kwargs
    )
    megatron_config.grad_scale_func = optimizer.scale_loss
    if config.overlap_grad_reduce:
        # Gradients are reduced once a step, after its last micro-batch.
        functions = [chunk.no_sync for chunk in wrapped]
        megatron_config.no_sync_func = functions if len(functions) > 1 else functions[0]
    return TrainState(wrapped, optimizer, scheduler, settings_of(config))


def _scheduler(config: RunConfig, optimizer: MegatronOptimizer, total_steps: int) -> OptimizerParamScheduler:
    decay_steps = config.lr_decay_iters or max(total_steps, config.lr_warmup_iters + 1)
    warmup_steps: float = config.lr_warmup_iters
    if config.lr_warmup_fraction is not None:
        warmup_steps = config.lr_warmup_fraction * decay_steps
    constant = config.weight_decay_incr_style == "constant"
    return OptimizerParamScheduler(
        optimizer,
        init_lr=config.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=config.lr_decay_style,
        wsd_decay_steps=config.lr_wsd_decay_iters,
        lr_wsd_decay_style=config.lr_wsd_decay_style,
        start_wd=config.weight_decay if constant else config.start_weight_decay,
        end_wd=config.weight_decay if constant else config.end_weight_decay,
        wd_incr_steps=0 if constant else decay_steps,
        wd_incr_style=config.weight_decay_incr_style,
    )
