"""`--rm-type exact`: the answer, character for character."""

from miles.config import RunConfig
from miles.utils.types import Sample


async def exact_reward(config: RunConfig, sample: Sample) -> float:
    """1.0 if the response was completed and, white space around it aside, equals the label; else 0.0."""
    completed = sample.status == Sample.Status.COMPLETED
    return float(completed and sample.response.strip() == sample.label.strip())
