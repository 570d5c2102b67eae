"""--loss-type custom_loss --custom-loss-function-path examples.hooks.loss.loss

REINFORCE: the advantage times the log-probability, without ratio or clip.
"""

from miles.training.losses import weighted_sum


def loss(config, log_probs_N, entropy_N, packed, sums):
    loss = weighted_sum(-log_probs_N * packed.columns["advantages"], packed.weight_N)
    return loss, {"train/loss": loss.detach()}
