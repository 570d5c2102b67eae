"""A reward for sums: the last whole number of the response."""

import re

from miles.config import RunConfig
from miles.utils.types import Sample


async def reward(config: RunConfig, sample: Sample) -> float:
    """1 if the response ended by itself and the last whole number in it is the label, else 0.

    Unlike `math`, which takes "27 + 82" for equal to 109, it asks for the sum itself.
    """
    numbers = re.findall(r"\d+", sample.response)
    return float(sample.status == Sample.Status.COMPLETED and bool(numbers) and numbers[-1] == sample.label)
