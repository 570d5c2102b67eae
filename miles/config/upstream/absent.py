"""What Miles or slime have and this program lacks: flags, what they would do, and what to use in their place.

One sentence answers all flags of one row that a command line has.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from miles.config.names import flag_of
from miles.config.upstream.functions import ABSENT_FUNCTIONS


class Absent(NamedTuple):
    """A feature that is not here.

    Args:
        flags: of Miles and slime that ask for it; one that ends in `-` stands for all that begin so.
        what: the feature.
        use: what the user can do.
    """

    flags: tuple[str, ...]
    what: str
    use: str


def _row(flags: str, what: str, use: str) -> Absent:
    return Absent(tuple(f"--{name}" for name in flags.split()), what, use)


ABSENT: tuple[Absent, ...] = (
    # Trainer
    _row(
        "optimizer-cpu-offload use-precision-aware-optimizer overlap-cpu-optimizer-d2h-h2d optimizer-offload-fraction",
        "an optimizer whose state stays on the host during the step",
        "use --stream-optimizer-state-to-disk, which keeps it on disk, or more trainer ranks, which share it",
    ),
    _row(
        "gradient-checkpointing attn-implementation fsdp-cpu-offload fsdp-cpu-backend fsdp-state-dict-cpu-offload "
        "keep-fp32-master dp-replicate-size use-checkpoint-lr-scheduler override-lr-scheduler warmup-ratio fp16",
        "the FSDP trainer",
        "leave them out; --recompute-granularity and --lr-warmup-fraction are Megatron's",
    ),
    _row(
        "lora-rank lora-alpha lora-dropout lora-type target-modules exclude-modules lora-adapter-path "
        "lora-sync-from-tensor lora-base-cpu-backup lora-train-only experts-shared-outer-loras check-lora-weight-equal "
        "no-sglang-lora-use-virtual-experts multi-lora-",
        "training of adapters (LoRA)",
        "leave them out: all weights are trained",
    ),
    _row(
        "use-rollout-routing-replay use-routing-replay use-indexer-replay use-rollout-indexer-replay",
        "replay of the experts that the engines chose",
        "use --use-tis or --use-rs, which weigh or leave out tokens whose probabilities differ",
    ),
    _row(
        "enable-mtp-training mtp-loss-scaling-factor",
        "training of layers for further tokens",
        "leave them out: such layers of a checkpoint are not loaded",
    ),
    _row("freeze-indexer", "an indexer that is not trained by choice", "leave it out"),
    _row(
        "te-precision-config-file fp4-format fp4-recipe fp8-param-gather extra-high-precision-layers-hf "
        "extra-high-precision-layers-megatron",
        "precision by layer, and training in FP4",
        "use --fp8-format and --fp8-recipe, which hold for all linear layers",
    ),
    _row(
        "grad-reduce-in-bf16",
        "sums of gradients in bf16 by this name",
        "use --no-accumulate-allreduce-grads-in-fp32, which adds up and reduces in the model's type",
    ),
    _row(
        "true-on-policy-mode true-on-policy-contract batch-invariant-mode recompute-logprobs-via-prefill "
        "sglang-true-on-policy-contract",
        "trainer and engines whose log-probabilities are equal to the bit",
        "use --use-rollout-logprobs, --use-tis or --max-logprob-abs-diff",
    ),
    _row(
        "use-dynamic-global-batch-size allow-partial-train-step disable-rollout-trim-samples",
        "steps of as many samples as there happen to be",
        "use --global-batch-size or --num-steps-per-rollout",
    ),
    _row(
        "megatron-config-path critic-num-nodes critic-num-gpus-per-node",
        "a critic with a layout of its own",
        "leave them out: it is laid out as the actor, on its GPUs",
    ),
    _row(
        "indep-dp delay-split-train-data-by-dp release-train low-memory-resume debug-disable-optimizer "
        "megatron-deepgemm-",
        "this way of running the trainer",
        "leave it out",
    ),
    _row(
        "freeze-params-name-list only-train-params-name-list use-stateless-adam",
        "training of some parameters alone, and an Adam without a state",
        "leave them out; --reset-optimizer-states empties its state before each rollout",
    ),
    _row(
        "custom-megatron-init-path custom-megatron-before-log-prob-hook-path "
        "custom-megatron-before-train-step-hook-path custom-megatron-post-save-hook-path "
        "custom-advantage-function-path custom-pg-loss-reducer-function-path",
        "this function of your own",
        "use --rollout-data-postprocess-path for advantages, --custom-loss-function-path for a loss, or "
        "--advantage-estimator dr_grpo with --constant-loss-length for a constant divisor",
    ),
    _row("mfu-peak-tflops", "a peak of your own for the utilisation", "leave it out: it is the device's"),
    # Engines and rollouts
    _row(
        "use-fault-tolerance ft-components control-server-port mini-ft-controller- trainer-heartbeat-checker- "
        "router-health-success-threshold router-health-check-interval-secs router-health-failure-threshold "
        "router-health-check-timeout-secs",
        "engines and trainers that are started again while the run goes on",
        "leave them out: others write what a dead engine was writing, until --load resumes the run; "
        "--rollout-health-check-timeout says when one stands still",
    ),
    _row(
        "prefill-num-servers sglang-config",
        "engines of several kinds, for prefill and decoding or of other models",
        "leave them out: all engines are alike",
    ),
    _row(
        "use-miles-router miles-router- router-",
        "a router of Miles' own, and other settings of SGLang's",
        "use --sglang-router-policy",
    ),
    _row(
        "p2p-transfer-num-workers p2p-transfer-timeout sglang-remote-instance-weight-loader-ib-device "
        "update-weight-local-checkpoint-dir update-weight-delta-encoding update-weight-delta-checksum "
        "custom-update-weight-post-write-path update-weight-mode update-weight-transport update-weight-disk-keep-files",
        "weights sent by RDMA or as differences",
        "use --update-weight-transfer-mode broadcast or disk",
    ),
    _row(
        "object-store-backend mooncake- rollout-data-transport",
        "another store than Ray's for samples",
        "leave it out",
    ),
    _row(
        "eval-num-gpus eval-num-gpus-per-engine eval-hf-dir eval-max-in-flight eval-overflow-policy "
        "eval-keep-snapshots eval-sglang-",
        "engines for evaluations alone",
        "leave them out: evaluations take turns with rollouts on the same engines",
    ),
    _row(
        "custom-async-data-buffer-path rollout-submission-granularity pin-rollout-manager-to-head use-distributed-post "
        "http-proxy",
        "this way of collecting samples",
        "use --buffer-filter-path, --async-max-concurrent-samples or --rollout-function-path",
    ),
    _row(
        "rollout-buffer-url fetch-trajectory-retry-times min-batch-collection-ratio rollout-task-type "
        "load-forge-rollout-data",
        "samples from a service of another program",
        "use --rollout-function-path",
    ),
    _row(
        "disable-rollout-global-dataset",
        "a run without prompts",
        "use --data-source-path, in whose place --prompt-data is not needed",
    ),
    _row(
        "filter-zero-reward-samples",
        "this filter by a flag",
        "use --dynamic-sampling-filter-path miles.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
    ),
    _row("rollout-sample-hook-path", "this function of your own", "use --rollout-sample-filter-path"),
    _row(
        "use-session-server tito-model session-message-matcher session-sample-picker-path "
        "session-sample-postprocessor-path",
        "this choice of a session server",
        "leave them out: one starts with --custom-generate-function-path "
        "miles.rollout.generate_hub.agentic_tool_call.generate",
    ),
    _row("max-seq-len", "an agent's limit by this name", "use --rollout-max-context-len"),
    # What a run leaves behind
    _row(
        "use-miles-dashboard dashboard- use-prometheus prometheus-port prometheus-run-name",
        "a dashboard",
        "use --use-tensorboard, and metrics.jsonl in --run-dir",
    ),
    _row(
        "log-reward-category log-multi-turn log-correct-samples use-rollout-entropy",
        "these metrics",
        "use --custom-rollout-log-function-path",
    ),
    _row("tb-project-name tb-experiment-name tensorboard-dir", "names of TensorBoard's folders", "use --run-dir"),
    _row("wandb-always-use-train-step", "another horizontal axis in W&B", "leave it out"),
    _row(
        "save-debug-trajectory-data save-debug-train-data save-debug-event-data load-debug-rollout-data-subsample "
        "dumper- env-report",
        "this kind of dump",
        "use --save-debug-rollout-data",
    ),
    _row(
        "check-weight-update-selector check-weight-update-skip-list check-weight-update-allow-quant-error "
        "save-local-weight-checksum",
        "a choice of the weights that are compared",
        "use --check-weight-update-equal, which compares all",
    ),
    _row(
        "check-rematerialize-param-from-master-weight enable-event-analyzer enable-witness witness-buffer-size "
        "debug-deterministic-collective debug-skip-weight-update",
        "this check",
        "use --check-residency, which compares the trainer's memory before and after each sleep",
    ),
    _row("ci-", "a check of Miles' own tests", "leave it out; --max-logprob-abs-diff bounds a difference"),
    _row(
        "ref-ckpt-step opd-teacher-ckpt-step",
        "a reference or teacher from a Megatron checkpoint",
        "give --ref-load or --opd-teacher-load a Hugging Face folder; --save-hf writes such",
    ),
    _row("multimodal-keys", "prompts with pictures, sound or film", "leave it out: --input-key is a column of texts"),
    _row(
        "opd-log-prob-top-k opd-top-k-strategy opd-reward-weight-mode opd-topk-per-position",
        "distillation over the likeliest tokens of student and teacher",
        "leave them out: the tokens that were sampled are compared",
    ),
    _row("opd-teacher-key", "a teacher for each row", "use --opd-teacher-urls, which all rows have"),
    _row(
        "async-save",
        "a checkpoint that is written while the run goes on",
        "leave it out: --save-interval says how often",
    ),
    _row(
        "record-memory-history memory-recorder memory-snapshot-",
        "a record of the trainer's allocations",
        "use --use-pytorch-profiler for its time, and the metrics perf/gpu_residual_* for what stays behind in a sleep",
    ),
    _row("save-trigger-sentinel", "a checkpoint on request", "use --save-interval"),
    _row("debug-exit-after-rollout", "a run that ends early", "use a smaller --num-rollout, with --lr-decay-iters"),
)

# Values of flags of ours, by field and value: what there is in their place.
ABSENT_VALUES: dict[tuple[str, str], str] = {
    ("update_weight_transfer_mode", "p2p"): "use broadcast, which sends over NCCL, as the nearest",
    ("update_weight_transfer_mode", "disk-delta"): "use disk, which writes all weights",
    ("moe_router_load_balancing_type", "seq_aux_loss"): "use aux_loss, which balances over a micro-batch",
    ("moe_router_load_balancing_type", "global_aux_loss"): "use aux_loss, which balances over a micro-batch",
    ("moe_router_load_balancing_type", "sinkhorn"): "use aux_loss",
}


def absent_values(raw: Mapping[str, Any]) -> dict[str, str]:
    """What the user is told of values that Miles knows and this program does not, by field.

    Args:
        raw: texts of the command line and values of the YAML file, by field.
    """
    told: dict[str, str] = {}
    for name, value in raw.items():
        if use := ABSENT_VALUES.get((name, str(value))):
            told[name] = f"{flag_of(name)} {value} is known from Miles, not here; {use}"
        elif what := ABSENT_FUNCTIONS.get(str(value)):
            told[name] = f"{flag_of(name)} {value} is known from Miles, not here: {what}"
    return told


_ROWS = {flag: row for row in ABSENT for flag in row.flags}


def row_of(flag: str) -> Absent | None:
    """The feature that a flag asks for; None where it is not known from Miles."""
    if flag in _ROWS:
        return _ROWS[flag]
    return next((row for start, row in _ROWS.items() if start.endswith("-") and flag.startswith(start)), None)


def sentences(flags: Iterable[str]) -> Iterator[str]:
    """What the user is told of flags that `row_of` knows: a sentence for each feature."""
    asked: dict[Absent, list[str]] = {}
    for flag in flags:
        row = row_of(flag)
        assert row is not None, flag
        asked.setdefault(row, []).append(flag)
    for row, names in asked.items():
        are = "is" if len(names) == 1 else "are"
        yield f"{', '.join(names)} {are} known from Miles, not here: {row.what}; {row.use}"
