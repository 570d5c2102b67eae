"""Megatron's process groups while the trainer sleeps: destroyed, and built anew behind the same attributes.

megatron-core 0.19.2 can destroy its groups, but keeps them as attributes of modules, buffers and optimizers all over
the process, where groups built anew do not come. Delete this once it asks `parallel_state` at each use, or NCCL gives
back the buffers of a communicator that lives on.
"""

import enum
import gc
import logging
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import compress, filterfalse
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import distributed_c10d

from miles.utils.agreement import Agreement

logger = logging.getLogger(__name__)

_MEMORY_BUFFER = "_GLOBAL_MEMORY_BUFFER"
_UNSEEN = "what the garbage collector does not show (a local variable of a running function, or C++)"


class SubGroups:
    """All groups that Megatron's parallel_state made, on this rank. Their NCCL buffers are gigabytes on a GPU.

    Construct it on all ranks together, once the groups exist; the verbs are called on all ranks together too. torch's
    world and groups that others made are left alone.

    Groups are kept as attributes all over the model, the gradient buffers and the optimizer. After `destroy` each of
    these places holds a stand-in that raises RuntimeError when used (None would not do: it means the world to
    torch.distributed, and a destroyed gloo group keeps working); after `rebuild` the new group that has the name of the
    old one in parallel_state. The places known from earlier cycles are filled first; only where something old outlives
    that is the process searched for its holders (0.1 to 1 s). So holders may come at any time, also while the groups
    are away, and usual cycles search nothing. Known places are kept alive. The groups of a world of one rank stay as
    they are: they have no peers to keep buffers for, and destroying them took 0.5 to 0.8 s a sleep on an H200.

    Args:
        build: makes Megatron's groups; called again with the same result.
        agreement: of all ranks, through a group that stays.
    """

    def __init__(self, build: Callable[[], None], agreement: Agreement):
        self._build = build
        self.agreement = agreement
        self._state = _State.UP
        self._alone = dist.get_world_size() == 1
        self._places: list[_Place] = []
        # Who must be gone: the old groups, or after a rebuild the stand-ins, by their first name in parallel_state.
        self._replaced: dict[str, weakref.ref] = {}
        self._stand_ins: dict[str, _StandIn] = {}
        self._sharing: set[tuple[str, ...]] = set()
        self._settings: dict[str, object] = {}

    @property
    def alive(self) -> bool:
        """Whether the groups exist and can be used."""
        return self._state is _State.UP

    def destroy(self) -> None:
        """Destroy the groups, once all ranks are here and the device is idle. No-op where they are destroyed already.

        After an error, call it again (or `rebuild`): what was done is not repeated.
        Raises RuntimeError, naming the holders, where an old group is kept by something that cannot be given another
        value (a tuple, a suspended generator); the groups are destroyed then.
        """
        if self._state is _State.DOWN:
            logger.info("the process groups are destroyed already")
            return
        if self._alone:
            self._state = _State.DOWN
            return
        if self._state is _State.UP:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            # Nobody's last collective may lose its peer.
            dist.barrier(group=self.agreement.group)
            self._sharing, self._settings = set(_sharing(_named_groups()).values()), _settings()
            self._replaced = {}
            self._state = _State.CHANGING
        if not self._stand_ins:
            self._stand_ins = {name: item for names in self._sharing for item in [_StandIn(names[0])] for name in names}
        self._replaced |= {names[0]: weakref.ref(group) for group, names in _sharing(_named_groups()).items()}
        self._fill(self._places, self._stand_ins)
        _destroy_groups()
        if unknown := self._replace(self._stand_ins):
            raise RuntimeError(
                "the process groups are destroyed, but some are still held where they cannot be replaced by the new "
                f"ones: {unknown}. Hold them in an attribute, a list or a dict, or drop them before the sleep"
            )
        self._state = _State.DOWN

    def rebuild(self) -> None:
        """Build the groups and put each where its predecessor was. No-op where they exist.

        Finishes a `destroy` or `rebuild` that failed. All ranks raise where one could not build: see `Agreement.check`.
        """
        if self._state is _State.UP:
            logger.info("the process groups exist already")
            return
        if self._alone:
            self._state = _State.UP
            return
        if self._state is _State.CHANGING:
            self.destroy()
        # A group's name in the store is its number. After a failure on one rank only the counts may differ.
        world = distributed_c10d._world
        world.group_count = self.agreement.largest(world.group_count)
        self._state = _State.CHANGING
        with self.agreement.alone("building the process groups anew"):
            self._build()
        groups = _named_groups()
        if (sharing := set(_sharing(groups).values())) != self._sharing:
            raise RuntimeError(
                "the new process groups are not those that were destroyed: under these names of parallel_state the "
                f"same groups are found only now or only before: {sorted(sharing ^ self._sharing)}"
            )
        vars(parallel_state).update(self._settings)
        self._replaced = {names[0]: weakref.ref(self._stand_ins[names[0]]) for names in self._sharing}
        self._stand_ins = {}
        self._fill(self._places, groups)
        if unknown := self._replace(groups):
            logger.warning("stand-ins of destroyed process groups are still held: %s", unknown)
        self._state = _State.UP

    def verify(self) -> None:
        """Check that nobody holds a group that was destroyed, or, after `rebuild`, what stood in for it.

        Raises RuntimeError that names each holder, or where a destroy or rebuild failed midway.
        """
        if self._state is _State.CHANGING:
            raise RuntimeError("the process groups are neither up nor down: the last destroy() or rebuild() failed")
        gc.unfreeze()
        gc.collect()
        if self._left():
            raise RuntimeError(f"destroyed process groups are still held: {self._explain()}")
        gc.freeze()

    def _left(self) -> dict[int, str]:
        """{id: name} of what must be gone and still lives."""
        return {id(item): name for name, reference in self._replaced.items() if (item := reference()) is not None}

    def _fill(self, places: list["_Place"], new: Mapping[str, object]) -> None:
        left = self._left()
        for place in places:
            place.replace(left, new)

    def _replace(self, new: Mapping[str, object]) -> str:
        """Search for what holds something that must be gone, and fill its places; returns what could not be filled."""
        if not self._left():
            return ""
        gc.collect()  # what only garbage holds need not be searched for, and garbage is not kept as a place
        if not self._left():
            return ""
        logger.info("process groups are held at places not known yet: searching the process")
        gc.unfreeze()
        gc.collect()
        for thorough in (False, True):
            if self._left():
                holders = self._search(_untracked_containers() if thorough else [])
                places = [_Place(container, key) for container, keys in holders for key in keys]
                self._fill(places, new)
                self._places += places
        explanation = self._explain() if self._left() else ""
        # The next collection looks only at what is made from now on: 0.3 s less in each cycle that leaves garbage.
        gc.freeze()
        return explanation

    def _search(self, untracked: list) -> list[tuple[Any, list]]:
        """(holder, keys) of all that hold something that must be gone; no keys where a holder cannot be written to.

        untracked: where to look besides what the collector tracks.
        """
        wanted = [item for reference in self._replaced.values() if (item := reference()) is not None]
        ids = {id(item) for item in wanted}
        holders = gc.get_referrers(*wanted) + _holders_among(untracked, ids)
        return [_keys_of(holder, ids) for holder in holders if holder is not wanted and not _is_ours(holder)]

    def _explain(self) -> str:
        """What is left, and the types of its holders."""
        untracked = _untracked_containers()
        names, holders = ", ".join(sorted(self._left().values())), self._search(untracked)
        ours, described = {id(untracked), id(holders), *map(id, holders)}, set()
        for holder, keys in holders:
            text = _describe(holder, ours, untracked)
            described.add(f"{', '.join(map(repr, keys))} of {text}" if keys else text)
        return f"{names}, held by {'; '.join(sorted(described)) or _UNSEEN}"


class _State(enum.Enum):
    UP = enum.auto()
    DOWN = enum.auto()
    CHANGING = enum.auto()  # in a verb, or it failed there


class _StandIn:
    """Sits where a destroyed group was."""

    def __init__(self, name: str):
        self._name = name

    def __repr__(self) -> str:
        return f"<process group {self._name}, destroyed while the trainer sleeps>"

    def __getattr__(self, attribute: str):
        raise RuntimeError(
            f"process group {self._name} was asked for {attribute} while it is destroyed (the trainer sleeps): "
            "wake it first"
        )


@dataclass(frozen=True)
class _Place:
    """An entry of a dict (mostly an instance's attributes) or list, or the content of a closure's cell."""

    container: dict | list | types.CellType
    key: Any

    def replace(self, old: Mapping[int, str], new: Mapping[str, object]) -> None:
        """If what is here now is one of `old` ({id: name}), put the item of that name in `new`."""
        name = old.get(id(self._content()))
        if name is None:
            return
        if isinstance(self.container, types.CellType):
            self.container.cell_contents = new[name]
        else:
            self.container[self.key] = new[name]

    def _content(self) -> object:
        if isinstance(self.container, dict):
            return self.container.get(self.key)
        items = self.container if isinstance(self.container, list) else gc.get_referents(self.container)
        return items[self.key] if self.key < len(items) else None


def _keys_of(holder: Any, ids: set[int]) -> tuple[Any, list]:
    """Where in `holder` the wanted objects are: (what is written to, its keys); no keys if it cannot be written to."""
    if isinstance(holder, types.CellType):
        return holder, [0]
    if isinstance(holder, list):
        return holder, [index for index, item in enumerate(holder) if id(item) in ids]
    if not isinstance(holder, dict):
        try:
            holder = vars(holder)
        except TypeError:
            return holder, []
    # A class's attributes are cached by the interpreter: its dict must not be written to behind its back.
    if not isinstance(holder, dict) or "__module__" in holder:
        return holder, []
    return holder, [key for key, item in holder.items() if id(item) in ids]


def _untracked_containers() -> list:
    """Dicts and tuples that the collector does not track since they hold nothing that it tracks (groups are such).

    gc.get_referrers does not see them.
    """
    # Not of modules: asyncio's gives dead objects of its free list, and letting go of one puts it there a second time,
    # after which every collection runs in circles. Their dicts are tracked themselves.
    objects = gc.get_objects()
    modules = {kind for kind in set(map(type, objects)) if issubclass(kind, types.ModuleType)}
    untracked: dict[int, object] = {}
    # Millions of objects: by functions in C, in a sixth of the time that a loop takes.
    layer = list(_of_types(objects, set(map(type, objects)) - modules))
    while layer:
        containers = list(filterfalse(gc.is_tracked, _of_types(gc.get_referents(*layer), {dict, tuple})))
        new = {id(item): item for item in containers if id(item) not in untracked}
        untracked |= new
        layer = list(new.values())
    return list(untracked.values())


def _of_types(items: list, kinds: set[type]) -> Iterator:
    return compress(items, map(kinds.__contains__, map(type, items)))


def _holders_among(containers: list, ids: set[int]) -> list:
    return [container for container in containers if any(id(item) in ids for item in gc.get_referents(container))]


def _is_ours(holder: object) -> bool:
    """A place, or one of this file's functions at work."""
    return isinstance(holder, _Place) or isinstance(holder, types.FrameType) and holder.f_code.co_filename == __file__


def _describe(holder: object, ours: set[int], untracked: list) -> str:
    """Its type; for a mere container also the types of what holds it, outwards, three at most."""
    containers, names = [holder], [_type_name(holder)]
    while len(names) < 4 and (containers := [item for item in containers if type(item) in (dict, list, tuple)]):
        owners = gc.get_referrers(*containers) + _holders_among(untracked, set(map(id, containers)))
        ours = ours | {id(containers), id(owners)}
        containers = [owner for owner in owners if id(owner) not in ours and not _is_ours(owner)]
        names.append(" or ".join(sorted({_type_name(owner) for owner in containers})) or "a local variable")
    return f"a {' in a '.join(names)}"


def _type_name(item: object) -> str:
    kind = type(item)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _named_groups() -> dict[str, dist.ProcessGroup]:
    """Every group in parallel_state's globals, by name, or by name and key where the global is a list or dict."""
    groups = {}
    for name, value in vars(parallel_state).items():
        if isinstance(value, dist.ProcessGroup):
            groups[name] = value
        elif isinstance(value, list | dict) and _is_variable(name):
            items: Iterable = value.items() if isinstance(value, dict) else enumerate(value)
            groups |= {f"{name}[{key!r}]": item for key, item in items if isinstance(item, dist.ProcessGroup)}
    return groups


def _is_variable(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _sharing(groups: Mapping[str, dist.ProcessGroup]) -> dict[dist.ProcessGroup, tuple[str, ...]]:
    """{group: all its names, sorted}."""
    names: dict[dist.ProcessGroup, list[str]] = {}
    for name, group in groups.items():
        names.setdefault(group, []).append(name)
    return {group: tuple(sorted(found)) for group, found in names.items()}


def _settings() -> dict[str, object]:
    """parallel_state's other globals: lists of ranks, sizes and ranks that were overridden, the virtual stage."""
    holding_groups = {name.partition("[")[0] for name in _named_groups()}
    return {
        name: value
        for name, value in vars(parallel_state).items()
        if _is_variable(name) and name.isupper() and name not in holding_groups | {_MEMORY_BUFFER}
    }


def _destroy_groups() -> None:
    """Destroy every group in parallel_state and clear its globals."""
    groups = _named_groups()
    ours = set(groups.values())
    # The last one first: one order on all ranks. Those that an earlier try destroyed are no longer in the map.
    left = [group for group in reversed(list(distributed_c10d._world.pg_map)) if group in ours]
    if left:
        # Side by side: NCCL takes 0.25 s to shut down one group, and 0.5 s for four at once.
        with ThreadPoolExecutor(len(left)) as threads:
            list(threads.map(lambda group: group.shutdown(), left))
    for group in left:
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    # It forgets some.
    for name in {name.partition("[")[0] for name in groups}:
        if isinstance(value := vars(parallel_state)[name], dict):
            value.clear()
        else:
            setattr(parallel_state, name, None)
