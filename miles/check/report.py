"""The ledger as text, to be read in a minute."""

from collections import Counter
from collections.abc import Mapping

from miles.check.advice import remedies
from miles.check.contents import Item
from miles.check.ledger import TIGHT, Device, Ledger
from miles.check.seconds import durations, total_seconds
from miles.check.walk import Column
from miles.utils.units import GB


def report(ledger: Ledger) -> str:
    """All of it: what is run, the fullest GPU, the other kinds, the host, disks, time, and what does not fit."""
    blocks = [_head(ledger)]
    if ledger.devices:
        blocks.append(_device(ledger, ledger.devices[0]))
    if len(ledger.devices) > 1:
        blocks.append(_others(ledger))
    blocks += [_host(ledger), _time(ledger), _verdict(ledger)]
    return "\n\n".join(block for block in blocks if block)


def _head(ledger: Ledger) -> str:
    config, model, work, sizes = ledger.config, ledger.model, ledger.work, ledger.config.parallel_sizes
    lines = [f"{model.name}, {model.parameters / 1e9:.2f} billion parameters, on {ledger.hardware.name}"]
    if config.needs_trainer:
        layout = {"TP": sizes.tp, "PP": sizes.pp, "CP": sizes.cp, "EP": sizes.ep, "DP": sizes.dp}
        lines.append(
            f"trainer: {config.actor_num_nodes} node{'s' * (config.actor_num_nodes > 1)} of "
            f"{config.actor_num_gpus_per_node} GPUs, " + ", ".join(f"{name} {size}" for name, size in layout.items())
        )
        lines.append(
            f"a step: {work.micro_batches} micro-batches of {work.tokens:,} tokens on each GPU, samples of up to "
            f"{work.longest:,} tokens" + (f" ({work.assumed})" if work.assumed else "")
        )
    if ledger.engine is not None:
        lines.append(
            f"engines: {config.num_engines} of {config.rollout_num_gpus_per_engine} GPUs, "
            f"{ledger.engine.tokens:,} tokens in the pool of each, enough for "
            f"{ledger.engine.tokens // work.longest} of the longest samples"
        )
    return "\n".join(lines)


def _device(ledger: Ledger, device: Device) -> str:
    rows = {
        str(item): {column: held.get(item, 0.0) for column, held in device.walk.gpu.items()}
        for item in Item
        if any(held.get(item) for held in device.walk.gpu.values())
    }
    memory = ledger.hardware.memory
    title = f"{device.name} ({device.count} of them, {memory / GB:.1f} GB each), highest moment of each phase, GB"
    return _table(title, rows, device.totals, memory)


def _others(ledger: Ledger) -> str:
    """One line for each other kind of device; those of a kind together."""
    counts: Counter[str] = Counter()
    for device in ledger.devices[1:]:
        column = max(device.totals, key=device.totals.__getitem__)
        train = f", {device.totals[Column.TRAIN] / GB:.1f} GB in train" if Column.TRAIN in device.totals else ""
        counts[f"{device.name}: at most {device.peak / GB:.1f} GB, in {column}{train}"] += device.count
    return "\n".join(["Other GPUs", *(f"  {count} x {said}" for said, count in counts.items())])


def _host(ledger: Ledger) -> str:
    host, memory = ledger.host, ledger.hardware.host_memory
    there = {column for device in ledger.devices for column in device.totals}
    totals = {column: size for column, size in host.totals.items() if column in there}
    text = _table(f"Host of the fullest node ({memory / GB:,.0f} GB), GB", host.memory, totals, memory)
    disk = [f"  {name}: {size / GB:,.1f} GB" for name, size in host.disk.items()]
    return "\n".join([text, *(["", "Disk of that node", *disk] if disk else [])])


def _table(
    title: str, rows: Mapping[str, Mapping[Column, float]], totals: Mapping[Column, float], capacity: float
) -> str:
    columns = [column for column in Column if column in totals]
    width = max(map(len, [*rows, "total"]))
    sizes = [max(len(column), 7) for column in columns]
    lines = [title, "  ".join([" " * width, *(f"{c:>{size}}" for c, size in zip(columns, sizes, strict=True))])]

    def line(name: str, values: Mapping[Column, float], always: bool = False) -> str:
        shown = [values.get(column, 0.0) / GB for column in columns]
        cells = [f"{value:.1f}" if always or abs(value) >= 0.05 else "" for value in shown]
        return "  ".join([f"{name:{width}}", *(f"{c:>{size}}" for c, size in zip(cells, sizes, strict=True))]).rstrip()

    lines += [line(name, values) for name, values in rows.items() if any(v >= 0.05 * GB for v in values.values())]
    lines.append(line("total", totals, always=True))
    lines.append(line("free", {column: capacity - totals[column] for column in columns}, always=True))
    return "\n".join(lines)


def _time(ledger: Ledger) -> str:
    parts = durations(ledger)
    if not parts:
        return ""
    total = total_seconds(ledger)
    lines = [f"A step takes {_seconds(total)} at least, if every response is as long as it may be"]
    width = max(len(part.phase) for part in parts)
    lines += [f"  {part.phase:{width}}  {_seconds(part.seconds):>8}  {part.why}" for part in parts]
    if ledger.engine is not None and ledger.config.needs_engines and parts[0].phase != "generate":
        lines.append("  and its engines cannot generate: see below")
    return "\n".join(lines)


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds < 10 else f"{seconds:,.0f} s"


def _verdict(ledger: Ledger) -> str:
    shortages = ledger.shortages
    if not shortages:
        fullest = max((device.peak for device in ledger.devices), default=0.0)
        if fullest > TIGHT * ledger.hardware.memory:
            return f"It fits, but tightly: {1 - fullest / ledger.hardware.memory:.1%} of a GPU are left."
        return "It fits."
    lines = ["It does not fit"]
    lines += [f"  {one.where}: {one.missing / GB:.1f} GB too much in the phase {one.column}" for one in shortages]
    ways = remedies(ledger)
    if not ways:
        return "\n".join([*lines, "No flag that was tried makes it fit: take more GPUs, or larger ones"])
    if all(way.missing for way in ways):
        lines.append("No flags that were tried make it fit; closest:")
    else:
        lines.append("Add one of these lines, best first" if len(ways) > 1 else "Add")
    for way in ways:
        said = (
            [] if way.slower is None else [f"a step takes {abs(way.slower):.0%} {'more' if way.slower > 0 else 'less'}"]
        )
        said += [f"{way.missing / GB:.1f} GB still missing"] if way.missing else []
        lines.append(f"  {way.flags}" + (f"  ({', '.join(said)})" if said else ""))
    return "\n".join(lines)
