"""Every metric that a run writes, with one line about it. A part in braces stands for a name or number of the run's.

A critic's are those of `train/` under `critic-train/`.
"""

import re

METRICS = {
    "rollout/raw_reward": "mean reward of the rollouts that have one; samples of one rollout count once",
    "rollout/rewards": "mean reward as it is trained with, compared with its group's, of the rollouts",
    "rollout/none_reward_ratio": "share of rollouts whose reward function abstained",
    "rollout/reward_error_ratio": "share of samples whose reward function failed",
    "rollout/removed_ratio": "share of samples marked as not to be trained on",
    "rollout/response_len/mean": "mean number of trainable response tokens",
    "rollout/response_len/median": "median number of trainable response tokens",
    "rollout/response_len/max": "largest number of trainable response tokens",
    "rollout/response_len/min": "smallest number of trainable response tokens",
    "rollout/total_lengths": "mean number of prompt and response tokens",
    "rollout/truncated_ratio": "share of samples cut off at the length limit",
    "rollout/rollout_log_probs": "mean log-probability of a response token, as the engine gave it",
    "rollout/log_probs": "mean log-probability of a trainable token, as the trainer gave it before training",
    "rollout/ref_log_probs": "mean log-probability of a trainable token under the reference",
    "rollout/teacher_log_probs": "mean log-probability of a trainable token under the teacher; SGLang's: temperature 1",
    "rollout/opd_reverse_kl": "mean log-probability of a trainable token, the model's minus the teacher's",
    "rollout/entropy": "mean entropy of the model's distribution at a trainable token, before training",
    "rollout/advantages": "mean advantage of a trainable token",
    "rollout/returns": "mean return of a trainable token, which the critic learns",
    "rollout/values": "mean value of a trainable token, as the critic gave it before training",
    "rollout/zero_std/count_{reward}": "groups in which every sample got this reward, rounded to one decimal",
    "rollout/zero_std/all_zero_percentage": "percentage of groups in which every reward is 0",
    "rollout/zero_std/all_one_percentage": "percentage of groups in which every reward is 1",
    "rollout/weight_version/mixed_version_ratio": "share of samples written with more than one version of the weights",
    "train/step": "optimizer steps so far",
    "train/loss": "what is minimised: policy loss, entropy and KL terms together, or the supervised loss",
    "train/pg_loss": "policy loss, clipped and with its corrections",
    "train/entropy_loss": "entropy of the model's distribution at each trained token",
    "train/pg_clipfrac": "share of trained tokens at which the clip decided the loss",
    "train/ppo_kl": "log-probability under the old policy minus that under the current one",
    "train/ess_ratio": "effective share of a sample's tokens under their ratios, current over old policy",
    "train/ppo_ratio_max": "largest ratio of current to old probability of a trained token",
    "train/ppo_ratio_min": "smallest ratio of current to old probability of a trained token",
    "train/kl_loss": "estimated KL divergence from the reference model",
    "train/train_rollout_logprob_abs_diff": "mean absolute difference of trainer and engine log-probabilities",
    "train/train_rollout_kl": "estimated KL divergence between the engine and the trainer",
    "train/rollout_ess_ratio": "effective share of a sample's tokens under their ratios, trainer over engine",
    "train/train_rollout_ratio_max": "largest ratio of trainer to engine probability of a trained token",
    "train/train_rollout_ratio_min": "smallest ratio of trainer to engine probability of a trained token",
    "train/tis": "mean ratio of trainer to engine probability, before --tis-clip",
    "train/tis_clipfrac": "share of trained tokens whose ratio is out of --tis-clip-low and --tis-clip",
    "train/tis_abs": "mean distance of that ratio from 1",
    "train/ois": "mean ratio of current to old probability, with --use-tis",
    "train/rs_fraction": "share of trained tokens that rejection sampling leaves out",
    "train/rs_veto_fraction": "share of trained tokens in sequences that --rs-veto-threshold leaves out",
    "train/opsm_clipfrac": "share of trained tokens in sequences that --use-opsm leaves out",
    "train/value_loss": "critic: clipped squared distance of values and returns",
    "train/value_clipfrac": "critic: share of trained tokens at which --value-clip decided the loss",
    "train/skipped_steps": "optimizer steps of the rollout skipped because their gradient norm was not finite",
    "train/grad_norm": "norm of the gradient before clipping",
    "train/lr-pg_{group}": "learning rate of an optimizer parameter group",
    "perf/step_time": "seconds of the whole step",
    "perf/rollout_time": "seconds of generation, rewards included",
    "perf/train_time": "seconds of training, log-probabilities included",
    "perf/log_probs_time": "seconds of the old policy's log-probabilities",
    "perf/ref_log_probs_time": "seconds of the reference's log-probabilities",
    "perf/teacher_log_probs_time": "seconds of the teacher's log-probabilities",
    "perf/actor_train_time": "seconds of the optimizer steps",
    "perf/values_time": "seconds of the critic's values",
    "perf/critic_train_time": "seconds of the critic's optimizer steps",
    "perf/update_weights_time": "seconds of the weight sync",
    "perf/update_weights_bytes": "bytes of weights sent to each engine in a sync",
    "perf/update_weights_tensors": "tensors sent to each engine in a sync",
    "perf/update_weights_gb_per_s": "gigabytes a second of a sync",
    "perf/update_weights_session_time": "seconds of a sync to pause the engines, empty their caches, and continue them",
    "perf/update_weights_wait_time": "seconds of a sync that the trainer waited for engines to take a bucket",
    "perf/sleep_time": "seconds until the trainer's memory left the GPU, of the slowest rank",
    "perf/sleep_bytes": "bytes copied out by the sleeping trainer, of all ranks; what is dropped does not count",
    "perf/sleep_gb_per_s": "gigabytes a second of a sleep, all ranks together",
    "perf/wake_up_time": "seconds until the trainer's memory was back on the GPU, of the slowest rank",
    "perf/wake_up_bytes": "bytes copied back by the waking trainer, of all ranks",
    "perf/wake_up_gb_per_s": "gigabytes a second of a wake, all ranks together",
    "perf/offload_rollout_time": "seconds until the engines' memory left the GPU",
    "perf/offload_rollout_bytes": "bytes released by the engines, in the sizes that SGLang reports at start",
    "perf/offload_rollout_gb_per_s": "gigabytes a second that the engines released",
    "perf/onload_rollout_time": "seconds until the engines' memory was back on the GPU",
    "perf/onload_rollout_bytes": "bytes taken back by the engines, in the sizes that SGLang reports at start",
    "perf/onload_rollout_gb_per_s": "gigabytes a second that the engines took back",
    "perf/destroy_process_groups_time": "seconds of taking the trainer's process groups down, of the slowest rank",
    "perf/reload_process_groups_time": "seconds of building the trainer's process groups anew, of the slowest rank",
    "perf/clear_memory_time": "seconds of emptying the trainer's caches before the engines return",
    "perf/cpu_memory_after_offload_train_gb": "gigabytes (1e9) of host memory of all trainer ranks after a sleep",
    "perf/gpu_residual_tensors_gb": "gigabytes of live tensors that stay on the GPU in a sleep, of all ranks",
    "perf/gpu_residual_cache_gb": "gigabytes of cached, unused blocks that stay on the GPU in a sleep, of all ranks",
    "perf/eval_time": "seconds of evaluation",
    "perf/save_model_time": "seconds of saving a checkpoint",
    "perf/tokens_per_gpu_per_sec": "response tokens generated a second and rollout GPU",
    "eval/{name}": "mean reward on an evaluation set, of the samples that have one",
    "eval/{name}-before_train": "the same before the first step, where that step has an evaluation of its own",
    "eval/{name}-none_reward_ratio": "share of evaluation samples whose reward function abstained",
    "eval/{name}-truncated_ratio": "share of evaluation samples cut off at the length limit",
    "eval/{name}/response_len/{statistic}": "mean, median, max and min number of response tokens in an evaluation",
}


def describe(name: str) -> str | None:
    """The registry's line about a metric, or None if it has none."""
    if name.startswith("critic-train/"):
        return describe(name.removeprefix("critic-"))
    if name in METRICS:
        return METRICS[name]
    # A set's name may hold a dash: the longest pattern that fits is the most exact.
    fitting = [pattern for pattern, regex in _PATTERNS.items() if regex.fullmatch(name)]
    return METRICS[max(fitting, key=len)] if fitting else None


_PATTERNS = {
    pattern: re.compile(re.sub(r"\\\{\w+\\\}", r"[^/]+", re.escape(pattern))) for pattern in METRICS if "{" in pattern
}
