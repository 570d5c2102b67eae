"""What a response is worth: one file a reward, with its record and its rule.

`--rm-type` names the reward of a run; a sample with an rm_type in its metadata has that one instead.
`--custom-rm-path` names a function that is asked for every sample, or with `--group-rm` for every group. The
configuration reads the records: nothing here imports it, but for types, nor a package that takes long. What asks for
rewards is in `compute`.
"""

from miles.rewards.built_in import BUILT_IN, built_in
from miles.rewards.reward import Reward

__all__ = ["BUILT_IN", "Reward", "built_in"]
