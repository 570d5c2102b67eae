"""benchmarks/common.py: what is printed is what is written."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
PROGRAM = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from common import parser, report
options = parser("A benchmark.").parse_args()
report("Title", [{"phase": "one", "seconds": 1.25}, {"phase": "two", "seconds": None}], {"samples": 3}, options.json)
"""


def test_json_holds_rows_machine_and_versions(tmp_path):
    path = tmp_path / "results" / "a.json"
    command = [sys.executable, "-c", PROGRAM, str(BENCHMARKS), "--json", str(path)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    result = json.loads(path.read_text())
    assert result["rows"] == [{"phase": "one", "seconds": 1.25}, {"phase": "two", "seconds": None}]
    assert result["notes"] == {"samples": 3}
    assert set(result["machine"]) == {"cpu", "cores", "memory_gib"}
    assert set(result["versions"]) == {"python", "torch", "megatron-core", "sglang", "transformers", "ray", "miles"}
    shown = ["Title", "1.25", "samples 3", result["machine"]["cpu"], result["versions"]["torch"]]
    assert all(text in printed for text in shown)
