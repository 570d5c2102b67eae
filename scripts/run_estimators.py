"""The demo task with each advantage estimator, from one warm-up: a table, and the curves of their rewards.

    python scripts/run_estimators.py                    # all, one after the other
    python scripts/run_estimators.py gspo ppo           # these; what others wrote earlier stands in the table too
    python scripts/run_estimators.py --table            # nothing is trained

Everything is written to runs/estimators, the warm-up only where it is missing. A tiny Qwen3 learns to reverse digits,
as in scripts/run_demo.sh; settings that are not below stand in scripts/demo/*.yaml.
"""

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from miles.tracking.report import duration, read_metrics
from miles.training.advantages import ESTIMATORS
from miles.utils.errors import UserError, ends_in_a_sentence

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("runs/estimators")
NUM_ROLLOUT = 24
ENDS = 3

# What an estimator does differently from scripts/demo/grpo.yaml, which clips ratios to 0.8 and 1.28 and averages the
# loss over the tokens of a step: nothing, where it is not here.
SAMPLE_MEAN = "--no-calculate-per-token-loss"
SETTINGS: dict[str, list[str]] = {
    # A sequence counts once, as in the paper. Its range, 3e-4 and 4e-4, is for long answers: of the 5 tokens here the
    # mean log-ratio moves more.
    "gspo": [SAMPLE_MEAN, "--eps-clip", "0.05", "--eps-clip-high", "0.05"],
    # As in the paper next to no lower bound; the upper one was chosen so that it is seldom reached.
    "cispo": ["--eps-clip", "0.99", "--eps-clip-high", "2.0"],
    # It divides by a constant, --rollout-max-response-len.
    "dr_grpo": [SAMPLE_MEAN],
    "reinforce_plus_plus": ["--kl-coef", "0.01"],
    "reinforce_plus_plus_baseline": ["--kl-coef", "0.01"],
    # The values start at zero: the critic learns faster than the model, and for two rollouts alone.
    "ppo": ["--critic-lr", "1e-3", "--critic-lr-warmup-iters", "4", "--num-critic-only-steps", "2", "--lambd", "0.95"],
}


@dataclass(frozen=True)
class Result:
    """One run: means of the reward over its first and last rollouts, held-out accuracy, seconds of all its steps."""

    first: float
    last: float
    before: float
    after: float
    seconds: float


def run(*command: str) -> None:
    """Run a command in the repository; its failure ends the script with the same exit code."""
    print("+", *command, flush=True)
    code = subprocess.run([sys.executable, *command], cwd=ROOT).returncode
    if code:
        sys.exit(code)


def warm_up() -> None:
    """Write prompts and a checkpoint that knows the format and has a first guess at the task."""
    prompts = ("-m", "miles.tools.make_prompts", "--task", "reverse")
    files = {name: str(FOLDER / f"{name}.jsonl") for name in ("sft", "train", "eval")}
    fresh = str(FOLDER / "fresh")
    run("-m", "miles.tools.make_tiny_checkpoint", "--seed", "0", "--output", fresh)
    run(*prompts, "--num", "4000", "--seed", "1", "--output", files["sft"])
    run(*prompts, "--num", "4000", "--seed", "2", "--output", files["train"])
    held_out = ("--num", "128", "--seed", "3", "--output", files["eval"])
    run(*prompts, *held_out, "--exclude", files["sft"], files["train"])
    places = ("--hf-checkpoint", fresh, "--prompt-data", files["sft"], "--run-dir", str(FOLDER / "warm_up"))
    run("train.py", "--config", "scripts/demo/sft.yaml", *places, "--save-hf", str(FOLDER / "warm"))


def train(estimator: str) -> None:
    """Train with one estimator; the held-out prompts are asked before the first rollout and after the last."""
    (ROOT / FOLDER / estimator / "metrics.jsonl").unlink(missing_ok=True)
    run(
        *("train.py", "--config", "scripts/demo/grpo.yaml", "--advantage-estimator", estimator),
        *("--hf-checkpoint", str(FOLDER / "warm"), "--prompt-data", str(FOLDER / "train.jsonl")),
        *("--eval-prompt-data", "reverse", str(FOLDER / "eval.jsonl"), "--eval-interval", str(NUM_ROLLOUT)),
        *("--num-rollout", str(NUM_ROLLOUT), "--run-dir", str(FOLDER / estimator), *SETTINGS.get(estimator, [])),
    )


def result_of(steps: list[dict]) -> Result:
    """What the table says about one run's metrics.

    Raises:
        UserError: the run did not end.
    """
    if len(steps) < NUM_ROLLOUT:
        raise UserError(f"{len(steps)} of {NUM_ROLLOUT} rollouts are done")
    rewards = [step["rollout/raw_reward"] for step in steps]
    return Result(
        first=sum(rewards[:ENDS]) / ENDS,
        last=sum(rewards[-ENDS:]) / ENDS,
        before=steps[0]["eval/reverse"],
        after=steps[-1]["eval/reverse"],
        seconds=sum(step["perf/step_time"] for step in steps),
    )


def table(results: dict[str, Result]) -> str:
    """The results in Markdown."""
    lines = [
        f"| estimator | reward, first {ENDS} rollouts | last {ENDS} | held out, before | after | time | settings |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, result in results.items():
        numbers = f"{result.first:.3f} | {result.last:.3f} | {result.before:.3f} | {result.after:.3f}"
        settings = f"`{' '.join(SETTINGS[name])}`" if name in SETTINGS else ""
        lines.append(f"| {name} | {numbers} | {duration(result.seconds)} | {settings} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("estimators", nargs="*", metavar="estimator", help=f"default: {' '.join(ESTIMATORS)}")
    parser.add_argument("--table", action="store_true", help="train nothing; show what earlier runs wrote")
    parser.add_argument("--output", type=Path, help=f"the .svg file (default {FOLDER}/estimators.svg)")
    options = parser.parse_args()
    if unknown := [name for name in options.estimators if name not in ESTIMATORS]:
        parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(ESTIMATORS)}")
    if not options.table:
        (ROOT / FOLDER).mkdir(parents=True, exist_ok=True)
        if not (ROOT / FOLDER / "warm" / "config.json").is_file():
            warm_up()
        for estimator in options.estimators or ESTIMATORS:
            train(estimator)

    files = {name: FOLDER / name / "metrics.jsonl" for name in ESTIMATORS if (ROOT / FOLDER / name).is_dir()}
    results = {}
    for name, file in files.items():
        try:
            results[name] = result_of(read_metrics(ROOT / file))
        except (UserError, OSError) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    if not results:
        sys.exit(f"error: no run in {FOLDER} has ended")
    print(table(results))
    shown = ("--output", str(options.output or FOLDER / "estimators.svg"), "--show", "reward", "--labels", *results)
    run("scripts/plot_metrics.py", *(str(files[name]) for name in results), *shown, "--title", "Reward by estimator")


if __name__ == "__main__":
    with ends_in_a_sentence():
        main()
