"""What the flags of Megatron's layers, recomputation and optimizer must satisfy among themselves."""

from collections.abc import Iterator

from miles.config.names import flag_of
from miles.config.values import Values


def _recompute(v: Values) -> Iterator[str]:
    given = [
        name
        for name in ("recompute_method", "recompute_num_layers", "recompute_modules")
        if getattr(v, name) is not None
    ]
    if v.recompute_granularity is None:
        for name in given:
            yield (
                f"{flag_of(name)} says how activations are recomputed and --recompute-granularity is not set; add "
                f"--recompute-granularity {'selective' if name == 'recompute_modules' else 'full'}, or drop it"
            )
    elif v.recompute_granularity == "selective":
        for name in given:
            if name != "recompute_modules":
                yield f"{flag_of(name)} is for --recompute-granularity full, not selective; drop it"
        # Megatron discards their output, and restores it, through Transformer Engine.
        bound = [name for name in v.recompute_modules or [] if name in ("layernorm", "mla_up_proj")]
        if bound and v.transformer_impl == "local":
            yield (
                f"--recompute-modules {' '.join(bound)} needs --transformer-impl transformer_engine, it is local; drop "
                f"{' and '.join(bound)}"
            )
    else:
        if "recompute_modules" in given:
            yield "--recompute-modules is for --recompute-granularity selective, not full; drop it"
        for name, values in (
            ("recompute_method", "uniform or block"),
            ("recompute_num_layers", "a number of layers, 1 for example"),
        ):
            if name not in given:
                yield f"--recompute-granularity full needs {flag_of(name)}: give {values}"


def _overlap(v: Values) -> Iterator[str]:
    if not v.overlap_param_gather:
        return
    if not v.use_distributed_optimizer:
        yield (
            "--overlap-param-gather overlaps a gather that only the distributed optimizer makes; drop it or "
            "--no-use-distributed-optimizer"
        )
    elif not v.overlap_grad_reduce:
        yield "--overlap-param-gather needs --overlap-grad-reduce too; add it"
    if v.stream_optimizer_state_to_disk:
        yield (
            "--overlap-param-gather is not possible with --stream-optimizer-state-to-disk, whose step gathers weights "
            "itself; drop one of them"
        )


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


def _router_losses(v: Values) -> Iterator[str]:
    kind, coefficient = v.moe_router_load_balancing_type, v.moe_aux_loss_coeff
    if kind == "none" and coefficient:
        yield (
            f"--moe-aux-loss-coeff {coefficient} weighs a loss and --moe-router-load-balancing-type is none; choose "
            "aux_loss, or drop the coefficient"
        )
    if kind != "none" and not coefficient:
        yield f"--moe-router-load-balancing-type {kind} has no effect with --moe-aux-loss-coeff 0; give a coefficient"
    if v.moe_token_dispatcher_type == "allgather" and v.pipeline_model_parallel_size > 1:
        yield (
            "--moe-token-dispatcher-type allgather needs micro-batches of one length between pipeline stages, which "
            f"packed ones have not (--pipeline-model-parallel-size {v.pipeline_model_parallel_size}); use alltoall"
        )


MEGATRON_RULES = (_recompute, _overlap, _transformer_engine, _router_losses)
