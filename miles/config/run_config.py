"""The whole configuration of a run."""

from collections.abc import Iterable

from pydantic import PrivateAttr

from miles.config.algorithm import AlgorithmConfig
from miles.config.checkpoint import CheckpointConfig
from miles.config.cluster import ClusterConfig
from miles.config.collecting import CollectingConfig
from miles.config.critic import CriticConfig
from miles.config.data import DataConfig
from miles.config.debug import DebugConfig
from miles.config.distillation import DistillationConfig
from miles.config.evaluation import EvaluationConfig
from miles.config.hooks import HooksConfig
from miles.config.layout import Layout
from miles.config.megatron import MegatronConfig
from miles.config.model import ModelConfig
from miles.config.multi_turn import MultiTurnConfig
from miles.config.off_policy import OffPolicyConfig
from miles.config.offload import OffloadConfig
from miles.config.optimizer import OptimizerConfig
from miles.config.reward import RewardConfig
from miles.config.rollout import RolloutConfig
from miles.config.schedule import ScheduleConfig
from miles.config.section import Section
from miles.config.sglang import SglangConfig
from miles.config.tracking import TrackingConfig
from miles.config.weight_sync import WeightSyncConfig


class RunConfig(
    SglangConfig,
    DebugConfig,
    HooksConfig,
    TrackingConfig,
    CheckpointConfig,
    EvaluationConfig,
    OptimizerConfig,
    DistillationConfig,
    CriticConfig,
    OffPolicyConfig,
    AlgorithmConfig,
    RewardConfig,
    WeightSyncConfig,
    ScheduleConfig,
    MultiTurnConfig,
    CollectingConfig,
    RolloutConfig,
    DataConfig,
    MegatronConfig,
    ModelConfig,
    OffloadConfig,
    ClusterConfig,
    Layout,
):
    """Everything a run can be told, in one flat frozen object; `model_copy(update=...)` makes a changed one.

    Built by `miles.utils.arguments.parse_args`, which also derives what was left unset and checks the whole.
    """

    _given: frozenset[str] = PrivateAttr(default=frozenset())

    @property
    def given(self) -> frozenset[str]:
        """Names of the fields that the user gave a value, on the command line or in the YAML file."""
        return self._given

    def with_given(self, names: Iterable[str]) -> "RunConfig":
        """The same configuration with these names as `given`."""
        changed = self.model_copy()
        changed._given = frozenset(names)
        return changed


# Pydantic collects fields from the last base class to the first; people read them in that order.
SECTIONS: tuple[type[Section], ...] = tuple(base for base in reversed(RunConfig.__bases__) if issubclass(base, Section))
