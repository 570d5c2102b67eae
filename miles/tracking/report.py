"""The report of a run: a line a step on screen and in metrics.jsonl, the same for trackers, a summary at the end."""

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from miles.config import RunConfig
from miles.tracking.sinks import Sinks
from miles.utils.disk import writing
from miles.utils.errors import UserError
from miles.utils.stopwatch import Stopwatch
from miles.utils.units import GB

logger = logging.getLogger(__name__)

# What the step line shows, where it is known. The times are also the phases of `Report.timer` and the rows of the
# closing table's last line: none may be a part of another. Where training waits for batches that are generated
# meanwhile, the wait is shown in place of the generation.
NUMBERS = {
    "reward": "rollout/raw_reward",
    "len": "rollout/response_len/mean",
    "loss": "train/loss",
    "kl(engine)": "train/train_rollout_kl",
    "grad": "train/grad_norm",
}
TIMES = {
    "generate": "perf/rollout_time",
    "wait": "perf/train_wait_time",
    "off": "perf/offload_rollout_time",
    "wake": "perf/wake_up_time",
    "train": "perf/train_time",
    "sleep": "perf/sleep_time",
    "on": "perf/onload_rollout_time",
    "sync": "perf/update_weights_time",
    "eval": "perf/eval_time",
    "save": "perf/save_model_time",
}
# These move memory: their bytes and speed stand under the same name with another ending.
MOVES = ("off", "wake", "sleep", "on", "sync")
EVAL_DETAILS = ("-before_train", "-none_reward_ratio", "-truncated_ratio", "-failed_ratio")


class Report:
    """Times the steps of a run and writes them down, in `metrics.jsonl` and `tensorboard` in the run's folder.

    Args:
        config: the run's configuration, with `num_rollout` set.
        start_rollout_id: the first step of this process. Lines of earlier steps are kept; a resumed run appends to
            them, and later ones, which will be written anew, are dropped.
        sinks: the trackers that are told the same.

    Raises:
        ValueError: `metrics.jsonl` exists and is broken.
    """

    def __init__(self, config: RunConfig, start_rollout_id: int, sinks: Sinks):
        assert config.run_dir is not None and config.num_rollout is not None, "both are known once a run begins"
        self.num_rollout = config.num_rollout
        self.path = Path(config.run_dir) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # An evaluation alone writes no step anew: it replaces nothing.
        replaced = None if self.num_rollout == 0 else start_rollout_id
        _drop_from(self.path, math.inf if replaced is None else replaced)
        self._sinks = sinks
        self._first = self._next = start_rollout_id
        self._initial: dict[str, float] = {}
        self._added: dict[str, float] = {}
        self._watch = Stopwatch()
        self._started = self._last = time.monotonic()
        self._tensorboard = None
        if config.use_tensorboard:
            # It imports torch, which takes seconds: only for those who use it.
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(self.path.parent / "tensorboard"), purge_step=replaced)

    def timer(self, phase: str) -> AbstractContextManager[None]:
        """Counts the seconds of a phase, one of `TIMES`, for the step that is reported next."""
        return self._watch(phase)

    def before_training(self, metrics: Mapping[str, float]) -> None:
        """Prints an evaluation of the run's start.

        It is written with the first step, under names that end in `-before_train` if that has its own.
        """
        self._initial = dict(metrics)
        print(f"before training{_evaluations(metrics)}", flush=True)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints and writes the evaluation of `step` that is all of a run, with the seconds of its `timer`."""
        print(f"evaluation{_evaluations(metrics)}", flush=True)
        times = self._times_so_far()
        self._write(step, {**metrics, **times, "perf/step_time": sum(times.values())})

    def begin(self) -> None:
        """The first step's time counts from here: no step pays for what came before."""
        self._started = self._last = time.monotonic()

    def add(self, metrics: Mapping[str, float]) -> None:
        """Takes metrics that belong to the step that is reported next."""
        self._added |= metrics

    def step(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Writes and prints one step: `metrics`, what was added and timed, and `perf/step_time`, the seconds of it all.

        A number that isn't finite is written as null, with a warning.
        """
        assert rollout_id == self._next, f"step {rollout_id} reported, but {self._next} is next"
        self._next += 1
        now = time.monotonic()
        seconds, self._last = now - self._last, now

        values = {name: float(value) for name, value in {**metrics, **self._added, **self._times_so_far()}.items()}
        self._added = {}
        line = _step_line(rollout_id, self.num_rollout, values)
        values["perf/step_time"] = seconds
        for name, value in self._initial.items():
            values[f"{name}-before_train" if name in values else name] = float(value)
        self._initial = {}
        self._write(rollout_id, values)
        left = (now - self._started) / (self._next - self._first) * (self.num_rollout - self._next)
        print(f"{line} | {seconds:.1f}s/step  eta {duration(left)}", flush=True)

    def _times_so_far(self) -> dict[str, float]:
        times = {TIMES[phase]: seconds for phase, seconds in self._watch.seconds.items()}
        self._watch = Stopwatch()
        return times

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        if bad:
            logger.warning("step %d: not finite: %s", step, ", ".join(f"{name} = {values[name]}" for name in bad))
        written = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = json.dumps({"step": step, "wall_time": time.time(), **written}, allow_nan=False) + "\n"
        with writing("--run-dir", self.path.parent):
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line)
            if self._tensorboard is not None:
                for name, value in values.items():
                    self._tensorboard.add_scalar(name, value, step)
                self._tensorboard.flush()
        self._sinks.write(step, values)

    def summary(self) -> str:
        """Ends the report: prints and returns the closing table of the whole run, and closes TensorBoard's files."""
        text = summarise(read_metrics(self.path))
        print(text, flush=True)
        if self._tensorboard is not None:
            self._tensorboard.close()
        return text


def read_metrics(path: Path) -> list[dict]:
    """The lines of a metrics.jsonl. A last line that was cut off while it was written is left out, with a warning.

    Raises:
        ValueError: a line that isn't a step's.
    """
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    if text and not text.endswith("\n"):
        logger.warning("%s: the last line was cut off and is dropped: %.80s", path, lines.pop())
    steps = []
    for number, line in enumerate(lines, 1):
        try:
            step = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}: not JSON ({error}); choose another run folder") from error
        if not isinstance(step, dict) or not isinstance(step.get("step"), int):
            raise UserError(f"{path}, line {number}: no object with a whole number 'step'; choose another run folder")
        steps.append(step)
    return steps


def summarise(steps: list[dict]) -> str:
    """The closing table of the steps that `read_metrics` gives: rewards and evaluations, and where the time went."""
    if not steps:
        return "no step was finished"
    names = dict.fromkeys(name for step in steps for name in step if _is_evaluation(name))
    rows = {"reward": NUMBERS["reward"], **{name: name for name in names}}
    width = max(12, *map(len, rows))
    lines = [f"{f'{len(steps)} step' + 's' * (len(steps) != 1):<{width}}{'first':>9}{'last':>9}{'best':>9}"]
    for label, name in rows.items():
        points = [(step["step"], step[name]) for step in steps if step.get(name) is not None]
        if points:
            best_step, best = max(points, key=lambda point: point[1])
            numbers = "".join(f"{value:9.3f}" for value in (points[0][1], points[-1][1], best))
            lines.append(f"{label:<{width}}{numbers}  (best at step {best_step + 1}; {len(points)} values)")
    total = sum(step["perf/step_time"] for step in steps)
    spent = {label: sum(_times(step).get(label, 0) for step in steps) for label in TIMES}
    spent["other"] = total - sum(spent.values())
    shares = [f"{label} {duration(value)} ({value / total:.0%})" for label, value in spent.items() if value > 0]
    lines.append(f"time {duration(total)}: " + ", ".join(shares))
    return "\n".join(lines)


def number(value: float) -> str:
    """Three significant digits, without padding: 0.53, 1.2e-4, 12300."""
    if value and math.isfinite(value) and abs(value) < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """3.2s, 45s, 1m45s, 2h03m."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _step_line(rollout_id: int, num_rollout: int, metrics: Mapping[str, float]) -> str:
    numbers = "".join(f"  {label} {number(metrics[name])}" for label, name in NUMBERS.items() if name in metrics)
    times = " ".join(_time(label, metrics) for label in _times(metrics))
    line = f"step {rollout_id + 1}/{num_rollout}{numbers}{_evaluations(metrics)}"
    return f"{line}  | {times}" if times else line


def _times(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """The seconds of each phase that are known, none of them twice."""
    known = {label: value for label, name in TIMES.items() if (value := metrics.get(name)) is not None}
    if "wait" in known:
        known.pop("generate", None)
    return known


def _time(label: str, metrics: Mapping[str, float]) -> str:
    """`train 0.9s`, or for a move `sleep 0.16s (8.3GB 52GB/s)`; the bracket is left out below a megabyte."""
    seconds = metrics[TIMES[label]]
    if label not in MOVES:
        return f"{label} {seconds:.1f}s"
    shown = f"{label} {seconds:.{2 if seconds < 0.995 else 1}f}s"
    name = TIMES[label].removesuffix("_time")
    gigabytes, speed = metrics.get(f"{name}_bytes", 0) / GB, metrics.get(f"{name}_gb_per_s")
    if gigabytes < 1e-3:
        return shown
    return f"{shown} ({_two_digits(gigabytes)}GB{'' if speed is None else f' {_two_digits(speed)}GB/s'})"


def _two_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.2g}"


def _evaluations(metrics: Mapping[str, float]) -> str:
    return "".join(f"  {name} {number(value)}" for name, value in metrics.items() if _is_evaluation(name))


def _is_evaluation(name: str) -> bool:
    return name.startswith("eval/") and "/response_len/" not in name and not name.endswith(EVAL_DETAILS)


def _drop_from(path: Path, start: float) -> None:
    """Keeps the lines of steps before `start`, so that no step is there twice."""
    if not path.exists():
        return
    steps = read_metrics(path)
    kept = [step for step in steps if step["step"] < start]
    if len(kept) < len(steps):
        logger.warning("%s: %d lines of steps from %s on are dropped", path, len(steps) - len(kept), start)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(step) + "\n" for step in kept), encoding="utf-8")
    os.replace(temporary, path)
