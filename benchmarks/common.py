"""What every benchmark shares: the option --json, the machine and the versions that a result belongs to."""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil
import rich
from rich.table import Table

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "megatron-core", "sglang", "transformers", "ray")

Row = dict[str, str | float | None]


def parser(doc: str) -> argparse.ArgumentParser:
    """A command line with --json; `doc` is the benchmark's module docstring."""
    result = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    result.add_argument("--json", type=Path, metavar="PATH", help="also write the result, machine and versions here")
    return result


def machine() -> dict[str, str | int | float]:
    """CPU model, cores that this process may use, and memory in GiB."""
    models = [line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and the main packages, and Miles' commit; None outside a git checkout."""
    result = {"python": platform.python_version()}
    result |= {package: importlib.metadata.version(package) for package in PACKAGES}
    return result | {"miles": _commit()}


def report(title: str, rows: list[Row], notes: dict[str, Any], json_path: Path | None) -> None:
    """Print one table, the notes under it, machine and versions; write the same to `json_path`.

    Args:
        rows: one a line, all with the same keys, which are the columns; None shows as a dash.
        notes: sizes and counts that the rows depend on.
    """
    result = {"title": title, "rows": rows, "notes": notes, "machine": machine(), "versions": versions()}
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(_shown(value) for value in row.values()))
    rich.print(table)
    for part in ("notes", "machine", "versions"):
        print(f"{part}: " + ", ".join(f"{name} {_shown(value)}" for name, value in result[part].items()))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(result, indent=2) + "\n")


def _shown(value: str | float | None) -> str:
    if value is None:
        return "-"
    return f"{value:#.3g}" if isinstance(value, float) else str(value)


def _commit() -> str | None:
    if not (ROOT / ".git").exists():
        return None
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain"], check=True, capture_output=True, text=True).stdout
    return f"{commit} and uncommitted changes" if changed else commit
