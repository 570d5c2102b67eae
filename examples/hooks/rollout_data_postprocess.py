"""--rollout-data-postprocess-path examples.hooks.rollout_data_postprocess.clip_advantages

Bounds the advantages that are trained with.
"""

MOST = 2.0


def clip_advantages(config, rollout_id, batch, columns):
    return {"advantages": columns["advantages"].clamp(-MOST, MOST)}
