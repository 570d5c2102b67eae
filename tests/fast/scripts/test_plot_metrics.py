"""scripts/plot_metrics.py: where the points stand, and that the drawing is well-formed."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts/plot_metrics.py"
SVG = "{http://www.w3.org/2000/svg}"


def plot(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=300)


def write(folder: Path, steps: list[dict]) -> Path:
    folder.mkdir()
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": number, **step}) + "\n" for number, step in enumerate(steps)))
    return path


def xs(line: ElementTree.Element) -> list[float]:
    return [float(point.split(",")[0]) for point in line.get("points").split()]


@pytest.fixture
def run(tmp_path) -> Path:
    return write(
        tmp_path / "a<b",
        [
            {"rollout/raw_reward": 0.0, "eval/x": 0.1, "eval/x-truncated_ratio": 1.0},
            {"rollout/raw_reward": None},
            {"rollout/raw_reward": 0.5},
            {"rollout/raw_reward": 1.0, "eval/x": 0.9, "eval/x/response_len/mean": 7.0, "perf/eval_time": 1.0},
        ],
    )


def test_a_point_stands_at_the_rollouts_trained_on(run, tmp_path):
    assert plot(run, "--output", tmp_path / "a.svg").returncode == 0
    reward, evaluation = ElementTree.parse(tmp_path / "a.svg").findall(f"{SVG}polyline")
    left, right = xs(evaluation)  # before training, and after all four rollouts
    unit = (right - left) / 4
    assert [round((x - left) / unit) for x in xs(reward)] == [0, 2, 3]


def test_an_evaluation_of_the_first_step_has_its_own_name_for_the_one_before(tmp_path):
    step = {"eval/x-before_train": 0.1, "eval/x": 0.2, "perf/eval_time": 1.0, "eval/x-truncated_ratio-before_train": 0}
    assert plot(write(tmp_path / "a", [step]), "--output", tmp_path / "a.svg").returncode == 0
    (line,) = ElementTree.parse(tmp_path / "a.svg").findall(f"{SVG}polyline")
    assert len(xs(line)) == 2 and xs(line)[0] < xs(line)[1]


def test_several_runs_are_labelled_by_folder(run, tmp_path):
    other = write(tmp_path / "c", [{"rollout/raw_reward": 2.5}, {"rollout/raw_reward": -1.0}])
    assert plot(run, other, "--output", tmp_path / "a.svg", "--title", "A & B").returncode == 0
    texts = [element.text for element in ElementTree.parse(tmp_path / "a.svg").findall(f"{SVG}text")]
    assert {"A & B", "a<b rollout/raw_reward", "a<b eval/x", "c rollout/raw_reward", "-1", "2.5"} <= set(texts)


def test_metrics_without_a_reward_are_refused(tmp_path):
    result = plot(write(tmp_path / "sft", [{"train/loss": 1.0}]), "--output", tmp_path / "a.svg")
    assert result.returncode == 1 and "no step has rollout/raw_reward" in result.stderr
    assert not (tmp_path / "a.svg").exists()


def test_labels_must_be_as_many_as_runs(run, tmp_path):
    result = plot(run, "--labels", "a", "b", "--output", tmp_path / "a.svg")
    assert result.returncode == 2 and "names 2 runs, 1 files are given" in result.stderr


def test_rewards_alone_are_labelled_by_run(run, tmp_path):
    arguments = (run, run, "--labels", "one", "two", "--show", "reward", "--output", tmp_path / "a.svg")
    assert plot(*arguments).returncode == 0
    tree = ElementTree.parse(tmp_path / "a.svg")
    assert len(tree.findall(f"{SVG}polyline")) == 2
    texts = [element.text for element in tree.findall(f"{SVG}text")]
    assert {"one", "two"} <= set(texts) and not [text for text in texts if "raw_reward" in text]
    evaluations = write(tmp_path / "b", [{"eval/x": 0.1}])
    assert "no step has rollout/raw_reward" in plot(evaluations, *arguments[4:]).stderr


@pytest.mark.parametrize(("rewards", "corner"), [([0, 0.3, 1], "right low"), ([0.9, *[0.05] * 30], "right high")])
def test_the_legend_stands_where_the_curve_is_not(rewards, corner, tmp_path):
    path = write(tmp_path / "a", [{"rollout/raw_reward": reward} for reward in rewards])
    assert plot(path, "--output", tmp_path / "a.svg").returncode == 0
    box = ElementTree.parse(tmp_path / "a.svg").findall(f"{SVG}rect")[1]
    x, y = float(box.get("x")), float(box.get("y"))
    assert corner == f"{'right' if x > 360 else 'left'} {'low' if y > 190 else 'high'}"
