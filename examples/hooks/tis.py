"""--custom-tis-function-path examples.hooks.tis.weights

Weighs each token by how much likelier it was to the trainer than to the engine, at most MOST times.
"""

from miles.training.losses import weighted_sum

MOST = 3.0


def weights(config, old_N, rollout_N, packed, sums):
    weight_N = (old_N - rollout_N).exp().clamp(max=MOST)
    return weight_N, {"train/tis": weighted_sum(weight_N, packed.metric_weight_N)}
