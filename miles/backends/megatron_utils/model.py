"""Builds the Megatron model, optimizer and schedule of one rank from a Hugging Face configuration."""

from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from miles.backends.megatron_utils import cpu_support
from miles.backends.megatron_utils.hf import family_for, padded_vocab_size
from miles.backends.megatron_utils.layers import PackedAttention, RMSNorm
from miles.config import RunConfig


@dataclass
class TrainState:
    """What one rank trains: the wrapped model, its optimizer and its learning-rate schedule (steps as units)."""

    model: DistributedDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


def transformer_config(config: RunConfig, hf_config) -> TransformerConfig:
    """Megatron's TransformerConfig of this checkpoint under the run's parallel sizes and precision."""
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    on_cpu = config.device == "cpu"
    return TransformerConfig(
        **family_for(hf_config).transformer_config(hf_config),
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        sequence_parallel=config.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=config.bf16,
        # The length of a packed micro-batch differs from one to the next.
        variable_seq_lengths=config.pipeline_model_parallel_size > 1,
        # The default, for experts that no family here has, refuses variable lengths.
        moe_token_dispatcher_type="alltoall",
        # Losses arrive divided by the counts of the whole step: nothing may be averaged again.
        calculate_per_token_loss=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=on_cpu,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        batch_p2p_comm=not on_cpu,
        batch_p2p_sync=not on_cpu,
    )


def block_spec(megatron_config: TransformerConfig) -> TransformerBlockSubmodules:
    """This stage's layers: Megatron's local layer with our attention over packed sequences and our RMSNorm."""
    spec = get_gpt_layer_local_spec(qk_layernorm=megatron_config.qk_layernorm, normalization="RMSNorm")
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    if megatron_config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules([spec] * get_num_layers_to_build(megatron_config), layer_norm=RMSNorm)


def stage_layers(megatron_config: TransformerConfig) -> list[range]:
    """The global layer indices of every pipeline stage, in stage order."""
    return [
        range(offset, offset + get_num_layers_to_build(megatron_config, pp_rank=stage))
        for stage in range(megatron_config.pipeline_model_parallel_size)
        for offset in (get_transformer_layer_offset(megatron_config, pp_rank=stage),)
    ]


def build_model(config: RunConfig, hf_config) -> GPTModel:
    """This rank's part of the model, uninitialised: weights come from a checkpoint. Needs Megatron's process groups."""
    megatron_config = transformer_config(config, hf_config)
    kwargs = family_for(hf_config).gpt_kwargs(hf_config)
    kwargs["vocab_size"] = padded_vocab_size(hf_config.vocab_size, config.tensor_model_parallel_size)
    rotary = RotaryEmbedding(
        megatron_config.kv_channels,
        kwargs.pop("rotary_percent"),
        rotary_base=kwargs.pop("rotary_base"),
        rope_scaling=kwargs.pop("rope_scaling", False),
        rope_scaling_factor=kwargs.pop("rope_scaling_factor", 1.0),
        use_cpu_initialization=config.device == "cpu",
    )
    model = GPTModel(
        config=megatron_config,
        transformer_layer_spec=block_spec(megatron_config),
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        # Our attention rotates queries and keys itself.
        position_embedding_type="none",
        **kwargs,
    )
    model.rotary = rotary
    return model.to(config.device)


def build_train_state(config: RunConfig, model: GPTModel, total_steps: int) -> TrainState:
    """Wrap `model` for data parallelism and build its optimizer and schedule for `total_steps` optimizer steps.

    Call it once the weights are loaded: the optimizer's master copies are taken from them.
    """
    megatron_config = model.config
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=config.use_distributed_optimizer
    )
    wrapped = DistributedDataParallel(megatron_config, ddp_config, model)
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
    )
    with cpu_support.cuda_type_names():
        optimizer = get_megatron_optimizer(optimizer_config, [wrapped])
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.lr_warmup_iters,
        lr_decay_steps=config.lr_decay_iters or max(total_steps, config.lr_warmup_iters + 1),
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    # With calculate_per_token_loss Megatron hands a token count over to divide by; ours is in the loss already.
    megatron_config.finalize_model_grads_func = lambda chunks, _num_tokens, **kwargs: finalize_model_grads(
        chunks, None, **kwargs
    )
    megatron_config.grad_scale_func = optimizer.scale_loss
    return TrainState(wrapped, optimizer, scheduler)
