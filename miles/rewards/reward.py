"""What a built-in reward is: one record. The configuration reads it, so that nothing heavy is imported here."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from miles.utils.errors import UserError

if TYPE_CHECKING:
    from miles.config import RunConfig
    from miles.config.values import Values
    from miles.utils.types import Sample

Judge = Callable[["RunConfig", "Sample"], Awaitable[Any]]


def label_of(sample: "Sample") -> str:
    """The label of a sample, for the judge of a reward that compares with one: it is asked for nothing without."""
    assert sample.label is not None, "Reward.need_label comes first"
    return sample.label


def _needs_nothing() -> None:
    pass


@dataclass(frozen=True)
class Reward:
    """One value of --rm-type.

    Args:
        name: the value.
        help: what earns the reward, for the description of the flag.
        judge: what a sample is worth: a number, a dict of numbers, or None to abstain. It runs in the event loop that
            also answers the engines: what computes for long does so in a thread, or in a process of `worker_pool`.
        read_label: reads a label as `judge` does, and raises UserError for one that can't be used; prompt files are
            checked with it. None: responses are compared with no label.
        numbers: where `judge` returns a dict, the entries that --reward-key can name, and what each may be.
        flags: fields of the configuration that it can't do without, each with the sentence's end that asks for it.
        check_machine: raises UserError if this machine lacks what it needs, such as a package.
    """

    name: str
    help: str
    judge: Judge
    read_label: Callable[[str], object] | None = None
    numbers: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    check_machine: Callable[[], None] = _needs_nothing

    def need_label(self, label: str | None) -> None:
        """Raise UserError if it compares with a label and there is none."""
        if self.read_label is not None and label is None:
            raise UserError(f"the reward {self.name} compares with a label, and the sample has none")

    def check_label(self, label: str | None) -> None:
        """Raise UserError as `need_label` does, or if it can't use this label.

        That takes some 0.2 ms with mathematics, which is not parsed yet, and less with the others. What only parsing
        shows, such as 0/0 or LaTeX that latex2sympy has no grammar for, is an error of each sample.
        """
        self.need_label(label)
        if self.read_label is not None and label is not None:
            self.read_label(label)

    def missing_flags(self, config: "RunConfig | Values") -> list[str]:
        """The ends of sentences that ask for what it needs of the configuration and does not have."""
        return [needs for name, needs in self.flags.items() if getattr(config, name) is None]
