"""--rollout-sample-filter-path examples.hooks.sample_filter.drop_truncated

Does not train on what was cut off at the length limit.
"""

from miles.utils.types import Sample


def drop_truncated(config, groups):
    for group in groups:
        for sample in group:
            if sample.status is Sample.Status.TRUNCATED:
                sample.remove_sample = True
