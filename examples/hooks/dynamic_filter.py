"""--dynamic-sampling-filter-path examples.hooks.dynamic_filter.not_too_easy

Trains on prompts that are answered wrongly at least once.
"""

from miles.rollout.base_types import DynamicFilterOutput


def not_too_easy(config, samples):
    wrong = [sample for sample in samples if sample.reward is not None and sample.reward < 1]
    return DynamicFilterOutput(keep=bool(wrong), reason=None if wrong else "all_right")
