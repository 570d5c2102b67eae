"""The policy of moves that a configuration asks for."""

from typing import Any

from miles.residency.plan import Place, Policy, Region

_REGIONS = {"kv_cache": Region.KV_CACHE, "weight": Region.WEIGHTS}
_TARGETS = {"cpu": Place.HOST, "disk": Place.DISK}


def policy_of(config: Any) -> Policy:
    """What moves, and where to, of a configuration or one in the making. See `Policy.problems` for what is legal."""
    rematerialize = config.rematerialize_param_from_master_weight
    sizes = config.parallel_sizes
    # Not yet derived, the expert-tensor-parallel size is 1 or the tensor-parallel one.
    splits_the_model = sizes.tp > 1 or sizes.pp > 1 or sizes.ep > 1 or (sizes.etp or 1) > 1
    return Policy(
        offload_train=bool(config.offload_train),
        offload_rollout=bool(config.offload_rollout),
        levels=frozenset(_REGIONS[level] for level in config.offload_rollout_level),
        target=_TARGETS[config.offload_train_target],
        peak_device=config.colocate_memory_peak_device,
        critic=config.use_critic,
        # No flag asks for LoRA yet.
        lora=False,
        rematerialize=rematerialize,
        stream_optimizer=config.stream_optimizer_state_to_disk,
        # Masters are split over the data- and context-parallel ranks, and each rank needs all of its weights.
        sync_gathers=splits_the_model or (rematerialize and sizes.dp * sizes.cp > 1),
    )
