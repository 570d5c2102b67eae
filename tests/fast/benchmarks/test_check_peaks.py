"""benchmarks/check_peaks.py: the ledger that it sets beside a step is that of train_step.py's flags."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "check_peaks", raising=False)
    import check_peaks

    return check_peaks


def test_a_step_that_was_measured(script, tmp_path):
    """0.6B at 16,384 tokens took 36.9 GB."""
    (row,) = (
        row
        for row in json.loads((BENCHMARKS / "results" / "train_step.json").read_text())["rows"]
        if (row["size"], row["tokens"]) == ("0.6B", 16384)
    )
    script.write_config(tmp_path, "0.6B")
    counted = script.counted_case(str(tmp_path), script.step_flags("0.6B", 16384, ""))
    assert counted["step"] / 1e9 == pytest.approx(row["peak GB"], rel=0.01)


def test_every_way_of_sharing_is_counted(script, tmp_path):
    script.write_config(tmp_path, "4B")
    hosts = {}
    for way, flags in script.WAYS.items():
        run = script.RUN.format(gpus=1).split()
        hosts[way] = script.counted_case(str(tmp_path), [*run, *flags.format(folder=".").split()])["host"]
    assert hosts["cpu"] == hosts["gpu"] > hosts["rematerialised"] > hosts["disk"]
