"""Records: a recipe has models, a model has layouts, and each may have flags of train.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from miles.config.names import flag_of, negation_of
from miles.utils.errors import UserError

# Flags of train.py by the names of their fields; a later record's win over an earlier one's, and None takes one out.
Flags = Mapping[str, str | int | float | bool | tuple[str, ...] | None]

GPUS_OF_A_NODE = {"H100": 8, "H200": 8, "B200": 8, "B300": 8, "GB200": 4, "GB300": 4, "cpu": 1}
HOPPER = ("H100", "H200")
BLACKWELL = ("B200", "B300")
GRACE = ("GB200", "GB300")


@dataclass(frozen=True)
class Layout:
    """How a model lies on some nodes. On a multiple of them there are more data-parallel copies of it.

    Args:
        hardware: what it is for; the first is what it was reckoned for.
        nodes: fewest nodes of the trainer.
        gpus_per_node: GPUs of each; None: all that the hardware has.
        tp, pp, cp, ep: tensor, pipeline, context and expert parallel sizes of the trainer.
        last_stage_layers: layers of the last pipeline stage, where the stages are not equal; `first_stage_layers` too.
        engine_gpus: GPUs of one engine.
        engine_memory: share of a GPU's memory that the engine takes for weights and keys.
        max_tokens_per_gpu: tokens of one micro-batch on a rank.
        flags: more.
    """

    hardware: tuple[str, ...]
    nodes: int = 1
    gpus_per_node: int | None = None
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    engine_gpus: int = 1
    engine_memory: float = 0.7
    max_tokens_per_gpu: int = 9216
    flags: Flags = field(default_factory=dict)

    def gpus_on(self, hardware: str) -> int:
        """GPUs that it takes of each node."""
        return self.gpus_per_node or GPUS_OF_A_NODE[hardware]

    def written_for(self, hardware: str) -> str:
        """As a user asks for it: `8 x 8 H200`."""
        return f"{self.nodes} x {self.gpus_on(hardware)} {hardware}"


@dataclass(frozen=True)
class Model:
    """One checkpoint that a recipe trains.

    Args:
        repository: on huggingface.co, ORG/NAME; NAME is --model-name.
        parameters: how many it has, in words.
        layouts: in the order of the documentation; the first says the default hardware and number of nodes.
        flags: of this model alone.
        make: words of a command that writes the checkpoint into the folder that it is given, instead of a download.
        waits_for: what Miles lacks to run it; until then `train` says so.
    """

    repository: str
    parameters: str
    layouts: tuple[Layout, ...]
    flags: Flags = field(default_factory=dict)
    make: Callable[[str], list[str]] | None = None
    waits_for: str | None = None

    @property
    def name(self) -> str:
        """Its --model-name, and its folder under --model-dir."""
        return self.repository.rpartition("/")[2]

    def layout(self, hardware: str, nodes: int, gpus_per_node: int) -> Layout:
        """The layout for these nodes: of those whose number divides theirs, the largest.

        Raises:
            UserError: there is none; the sentence lists those that there are.
        """
        fitting = [
            layout
            for layout in self.layouts
            if hardware in layout.hardware and layout.gpus_on(hardware) == gpus_per_node and nodes % layout.nodes == 0
        ]
        if fitting:
            return max(fitting, key=lambda layout: layout.nodes)
        known = [layout.written_for(name) for layout in self.layouts for name in layout.hardware]
        raise UserError(
            f"{self.name} has no layout for {nodes} x {gpus_per_node} {hardware}; there are {', '.join(known)} (nodes "
            "x GPUs a node, and multiples of the nodes): set --hardware, --num-nodes and --num-gpus-per-node, or run "
            "train.py with sizes of your own"
        )


@dataclass(frozen=True)
class Recipe:
    """What a script knows.

    Args:
        title: of the models together.
        models: the first is the default of --model-name.
        flags: what differs from `launcher.plan.COMMON`.
        task: default of --task.
    """

    title: str
    models: tuple[Model, ...]
    flags: Flags = field(default_factory=dict)
    task: str = "dapo_aime"

    def model(self, name: str | None) -> Model:
        """By --model-name. Raises UserError for one that the script does not know."""
        if name is None:
            return self.models[0]
        known = {model.name: model for model in self.models}
        if name not in known:
            raise UserError(f"--model-name {name}: this script trains {', '.join(known)}")
        return known[name]


def words(flags: Flags) -> list[str]:
    """The flags as words of a command line."""
    result: list[str] = []
    for name, value in flags.items():
        if value is None:
            continue
        if isinstance(value, bool):
            result.append(flag_of(name) if value else negation_of(name))
        else:
            result += [flag_of(name), *(value if isinstance(value, tuple) else (str(value),))]
    return result
