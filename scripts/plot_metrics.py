"""Draws reward and evaluations over the steps of one or more runs as an SVG file.

    python scripts/plot_metrics.py runs/demo/metrics.jsonl --output demo.svg
    python scripts/plot_metrics.py a/metrics.jsonl b/metrics.jsonl --output both.svg --title "Two seeds"

A thin line is rollout/raw_reward, a thick one with dots an eval/<name>; --show reward leaves the latter out. Both stand
at the number of rollouts that the measured weights had been trained on. Each run has a colour and a label: its folder's
name unless --labels names it.
"""

import argparse
import math
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

from miles.tracking.report import EVAL_DETAILS, read_metrics
from miles.utils.errors import UserError, ends_in_a_sentence

REWARD = "rollout/raw_reward"
COLOURS = ("#1f6fb4", "#d95f02", "#2a9d5c", "#8e44ad", "#b8860b", "#c0392b", "#17a2b8", "#5d6d7e")
WIDTH, HEIGHT = 720, 380
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 42, 44

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One curve: points (rollouts trained on, value), and whether it is an evaluation."""

    label: str
    points: list[Point]
    is_evaluation: bool


def series_of(steps: list[dict], run: str, only_reward: bool = False) -> list[Series]:
    """The reward and the evaluations of one run's metrics; `run` goes before each label. With `only_reward` it is it.

    Raises:
        UserError: there is neither.
    """
    curves: dict[str, list[Point]] = {}
    for step in steps:
        done = step["step"]
        for name, value in step.items():
            if value is None:
                continue
            if name == REWARD:
                curves.setdefault(REWARD, []).append((done, value))
            elif not only_reward and name.startswith("eval/") and "/response_len/" not in name:
                base = name.removesuffix("-before_train")
                if base.endswith(EVAL_DETAILS):
                    continue
                # The first step holds the evaluation before training too; only one after a step has its time measured.
                before = base != name or "perf/eval_time" not in step
                curves.setdefault(base, []).append((done if before else done + 1, value))
    if not curves:
        raise UserError(f"{run}: no step has {REWARD} or eval/<name>; is it a metrics.jsonl of a GRPO run?")
    if only_reward and run:
        return [Series(run, curves[REWARD], False)]
    names = sorted(curves, key=lambda name: name != REWARD)
    return [Series(f"{run} {name}".strip(), sorted(curves[name]), name != REWARD) for name in names]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about as many as asked for."""
    raw = (high - low) / about
    size = 10 ** math.floor(math.log10(raw))
    step = size * next(factor for factor in (1, 2, 5, 10) if factor * size >= raw * 0.999)
    return [round(k * step, 12) for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def draw(runs: list[list[Series]], title: str) -> str:
    """The SVG text: one colour a run, axes from zero (or the lowest value) to one (or the highest), and a legend."""
    points = [point for run in runs for series in run for point in series.points]
    with_evaluations = any(series.is_evaluation for run in runs for series in run)
    thin = 'stroke-width="1" opacity="0.55"' if with_evaluations else 'stroke-width="1.8"'
    x_high = max(1, max(x for x, _ in points))
    y_low, y_high = min(0.0, min(y for _, y in points)), max(1.0, max(y for _, y in points))

    def x_of(x: float) -> float:
        return LEFT + x / x_high * (WIDTH - LEFT - RIGHT)

    def y_of(y: float) -> float:
        return HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', _text(LEFT, 24, title, "start", "15", "#222")]
    for y in ticks(y_low, y_high):
        parts.append(_line(LEFT, y_of(y), WIDTH - RIGHT, y_of(y), "#e3e3e3"))
        parts.append(_text(LEFT - 8, y_of(y) + 4, f"{y:g}", "end"))
    for x in ticks(0, x_high, 8):
        parts.append(_line(x_of(x), HEIGHT - BOTTOM, x_of(x), HEIGHT - BOTTOM + 4, "#888"))
        parts.append(_text(x_of(x), HEIGHT - BOTTOM + 18, f"{x:g}", "middle"))
    parts.append(_line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, "#888"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "rollouts trained on", "middle"))
    labels, drawn = [], []
    for number, run in enumerate(runs):
        colour = COLOURS[number % len(COLOURS)]
        for series in run:
            places = [(x_of(x), y_of(y)) for x, y in series.points]
            drawn += places
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            style = 'stroke-width="2.5"' if series.is_evaluation else thin
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" {style}/>')
            if series.is_evaluation:
                parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in places]
            labels.append((series, colour))
    parts += _legend(labels, drawn)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif">\n{body}\n</svg>\n'
    )


def _legend(labels: list[tuple[Series, str]], drawn: list[Point]) -> list[str]:
    """In the corner where it hides the fewest of the points that are drawn; of equal ones at the lower right."""
    width, height = 40 + 7 * max(len(series.label) for series, _ in labels), 18 * len(labels) + 8
    corners = [
        (left, top) for top in (HEIGHT - BOTTOM - 6 - height, TOP + 6) for left in (WIDTH - RIGHT - 8 - width, LEFT + 8)
    ]
    left, top = min(
        corners,
        key=lambda corner: sum(0 <= x - corner[0] <= width and 0 <= y - corner[1] <= height for x, y in drawn),
    )
    parts = [f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="white" opacity="0.85"/>']
    for row, (series, colour) in enumerate(labels):
        y = top + 13 + 18 * row
        weight = 2.5 if series.is_evaluation else 1
        parts.append(_line(left + 6, y, left + 28, y, colour, weight))
        if series.is_evaluation:
            parts.append(f'<circle cx="{left + 17}" cy="{y}" r="3.5" fill="{colour}"/>')
        parts.append(_text(left + 34, y + 4, series.label, "start"))
    return parts


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, anchor: str, size: str = "12", colour: str = "#444") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{colour}">{escape(text)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("metrics", type=Path, nargs="+", help="metrics.jsonl of each run")
    parser.add_argument("--output", type=Path, required=True, help=".svg file to write")
    parser.add_argument("--title", default="Reward", help='heading (default "Reward")')
    parser.add_argument("--show", choices=("all", "reward"), default="all", help="which curves (default all)")
    parser.add_argument("--labels", nargs="+", help="name of each run (default: its folder's, for more than one run)")
    options = parser.parse_args()
    several = len(options.metrics) > 1
    labels = options.labels or [path.resolve().parent.name if several else "" for path in options.metrics]
    if len(labels) != len(options.metrics):
        parser.error(f"--labels names {len(labels)} runs, {len(options.metrics)} files are given")
    try:
        runs = [
            series_of(read_metrics(path), label, only_reward=options.show == "reward")
            for path, label in zip(options.metrics, labels, strict=True)
        ]
    except OSError as error:
        sys.exit(f"error: {error}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(draw(runs, options.title), encoding="utf-8")
    print(f"wrote {options.output}")


if __name__ == "__main__":
    with ends_in_a_sentence():
        main()
