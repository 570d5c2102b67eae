"""What the flags of the engines must satisfy: their GPUs, their parallel sizes, external ones, the router."""

from collections.abc import Iterator

from miles.config.layout_rules import model_shape
from miles.config.rollout import RolloutConfig
from miles.config.values import Values


def _engine_gpus(v: Values) -> Iterator[str]:
    if not v.needs_engines or v.rollout_external:
        return
    total, size = v.rollout_num_gpus, v.rollout_num_gpus_per_engine
    if size > v.num_gpus_per_node:
        yield (
            f"--rollout-num-gpus-per-engine {size} does not fit on a node of --num-gpus-per-node "
            f"{v.num_gpus_per_node}; lower the first or correct the second"
        )
    if not total:
        yield (
            f"--rollout-num-gpus is {total or 'not given'}, but the engines need GPUs of their own; give their number, "
            "or share the trainer's with --colocate"
        )
    elif v.colocate and total < v.world_size:
        yield (
            f"--rollout-num-gpus {total} contradicts --colocate, which gives the engines the trainer's {v.world_size} "
            "GPUs; leave it out, or give more than those: engines beyond them get GPUs of their own"
        )
    elif left := total % size:
        yield (
            f"--rollout-num-gpus {total}{' (the world size)' if v.colocate and total == v.world_size else ''} is no "
            f"multiple of --rollout-num-gpus-per-engine {size}, {left} would be left over; choose a divisor"
        )
    elif v.colocate and v.world_size % size:
        yield (
            f"--rollout-num-gpus-per-engine {size} does not divide the trainer's {v.world_size} GPUs: with --colocate "
            f"and --rollout-num-gpus {total}, an engine would share only some of its GPUs with it; choose a divisor"
        )


def _external_engines(v: Values) -> Iterator[str]:
    addresses = v.rollout_external_engine_addrs
    if v.rollout_external and not addresses:
        yield "--rollout-external needs --rollout-external-engine-addrs, the host:port of each engine"
    if addresses and not v.rollout_external:
        yield "--rollout-external-engine-addrs has no effect with --no-rollout-external; drop one"
    if not (v.rollout_external and addresses and v.needs_engines):
        return
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or "/" in address or not port.isdecimal() or not 0 < int(port) < 65536:
            yield f"--rollout-external-engine-addrs {address} must be host:port, such as 10.0.0.7:30000"
    for address in sorted({address for address in addresses if addresses.count(address) > 1}):
        yield f"--rollout-external-engine-addrs names {address} more than once; name each engine once"
    if v.colocate:
        yield (
            "--rollout-external with --colocate: whoever runs the engines chose their GPUs, and Miles cannot take "
            "turns with them there; drop one"
        )
    if v.rollout_num_gpus != len(addresses) * v.rollout_num_gpus_per_engine:
        yield (
            f"--rollout-num-gpus {v.rollout_num_gpus} is not {len(addresses)} external engines times "
            f"--rollout-num-gpus-per-engine {v.rollout_num_gpus_per_engine}; leave it out"
        )
    if v.sglang:
        flags = ", ".join(f"--sglang-{name.replace('_', '-')}" for name in v.sglang)
        yield f"{flags} has no effect on engines that run already (--rollout-external): give it to those, drop it here"


def _engine_parallel_sizes(v: Values) -> Iterator[str]:
    if not v.needs_engines or v.rollout_external:
        return
    size = v.rollout_num_gpus_per_engine
    stages, replicas, experts = (v.sglang.get(name, 1) for name in ("pp_size", "dp_size", "ep_size"))
    for flag, value in (("--sglang-pp-size", stages), ("--sglang-dp-size", replicas), ("--sglang-ep-size", experts)):
        if value < 1:
            yield f"{flag} is {value}; it is at least 1"
            return
    if size % stages:
        yield (
            f"--sglang-pp-size {stages} does not divide --rollout-num-gpus-per-engine {size}, the GPUs of an engine; "
            "choose a divisor"
        )
        return
    if stages > 1 and v.needs_trainer:
        yield (
            f"--sglang-pp-size {stages}: SGLang addresses a weight update to tensor-parallel ranks only, so that new "
            "weights reach one pipeline stage; raise --rollout-num-gpus-per-engine without it"
        )
    tensor = size // stages
    if tensor % experts:
        yield (
            f"--sglang-ep-size {experts} does not divide the {tensor} tensor-parallel ranks of an engine "
            "(--rollout-num-gpus-per-engine); choose a divisor"
        )
    if v.sglang.get("enable_dp_attention"):
        if v.device == "cpu":
            yield "--sglang-enable-dp-attention needs --device cuda: SGLang's DP attention allocates memory on a GPU"
        if tensor % replicas:
            yield (
                f"--sglang-dp-size {replicas} does not divide the {tensor} tensor-parallel ranks of an engine "
                "(--rollout-num-gpus-per-engine); choose a divisor"
            )
            return
        tensor //= replicas
    elif replicas > 1:
        yield (
            f"--sglang-dp-size {replicas} without --sglang-enable-dp-attention would be {replicas} engines in one, "
            "which SGLang cannot give new weights; add that flag, or have more engines: their number is "
            "--rollout-num-gpus divided by --rollout-num-gpus-per-engine"
        )
    heads = (model_shape(v.hf_checkpoint) or {}).get("num_attention_heads")
    if heads and heads % tensor:
        yield (
            f"--rollout-num-gpus-per-engine {size} does not divide the model's num_attention_heads {heads} among the "
            f"{tensor} ranks that share attention; choose a divisor of it"
        )


def _quantized_engines(v: Values) -> Iterator[str]:
    method = v.sglang.get("quantization")
    if v.needs_engines and v.needs_trainer and not v.rollout_external and method is not None:
        yield (
            f"--sglang-quantization {method}: SGLang quantises weights when it starts, and not those of an update; "
            "drop it"
        )


def has_draft(algorithm: str | None) -> bool:
    """Whether an algorithm of --sglang-speculative-algorithm has a draft model; NGRAM looks up what was written."""
    return algorithm is not None and algorithm.upper() != "NGRAM"


def _speculation(v: Values) -> Iterator[str]:
    algorithm = v.sglang.get("speculative_algorithm")
    if v.needs_engines and v.needs_trainer and not v.rollout_external and has_draft(algorithm):
        yield (
            f"--sglang-speculative-algorithm {algorithm}: its draft model gets no new weights, or the target's by "
            "mistake, and loses its own where the engine's memory is released, so that hardly a draft would be "
            "accepted; drop it, or give NGRAM, which has none"
        )


def _router(v: Values) -> Iterator[str]:
    ip, port, policy = v.sglang_router_ip, v.sglang_router_port, v.sglang_router_policy
    if (ip is None) != (port is None):
        given, other = ("ip", "port") if port is None else ("port", "ip")
        yield f"--sglang-router-{given} needs --sglang-router-{other} too: both name a router that runs already"
    if ip is not None and policy is not None:
        yield (
            f"--sglang-router-policy {policy} is for a router that Miles starts, and --sglang-router-ip {ip} names one "
            "that runs already; drop one"
        )
    seconds = v.sglang_router_request_timeout_secs
    if policy is not None and seconds < v.rollout_request_timeout:
        yield (
            f"--sglang-router-request-timeout-secs {seconds} is below --rollout-request-timeout "
            f"{v.rollout_request_timeout:g}: the router would give up first; raise it"
        )


ENGINE_RULES = (_engine_gpus, _external_engines, _engine_parallel_sizes, _quantized_engines, _speculation, _router)


def engine_warnings(v: Values) -> Iterator[str]:
    """What is allowed, and probably not meant."""
    seconds = v.sglang_router_request_timeout_secs
    default = RolloutConfig.model_fields["sglang_router_request_timeout_secs"].default
    if v.needs_engines and v.sglang_router_policy is None and seconds != default:
        yield f"--sglang-router-request-timeout-secs {seconds} has no effect without --sglang-router-policy"
