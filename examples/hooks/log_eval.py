"""--custom-eval-rollout-log-function-path examples.hooks.log_eval.show

Prints how many responses of each evaluation set got the full reward.
"""


def show(rollout_id, config, data, metrics):
    for name, samples in data.items():
        right = sum(sample.reward == 1 for sample in samples)
        print(f"evaluation {name} after rollout {rollout_id}: {right} of {len(samples)} right")
