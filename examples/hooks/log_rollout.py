"""--custom-rollout-log-function-path examples.hooks.log_rollout.show

Prints the best response of each rollout; Miles' own metrics are reported as always.
"""


def show(rollout_id, config, samples, metrics, seconds):
    best = max(samples, key=lambda sample: float("-inf") if sample.reward is None else sample.reward)
    print(f"rollout {rollout_id}, {len(samples)} samples in {seconds:.1f} s; reward {best.reward}: {best.response!r}")
    return False
