"""--buffer-filter-path examples.hooks.buffer_filter.most_written_first --partial-rollout

Goes on with the groups that have the longest responses so far: they hold the most work.
"""


def most_written_first(config, rollout_id, buffer, num_groups):
    buffer.sort(key=lambda group: sum(sample.response_length for sample in group))
    taken = buffer[-num_groups:]
    del buffer[-num_groups:]
    return taken
