import os
import subprocess
import sys
from pathlib import Path

import miles

PROGRAM = """
import multiprocessing as mp
import os
import signal
import threading
from miles.backends.sglang_utils.forked import forked

NUMBERS = []

def child(queue):
    handler = signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL
    queue.put((os.getppid(), NUMBERS, mp.get_start_method(), handler))

with forked():
    {thread}
    mp.set_start_method("spawn", force=True)
    signal.signal(signal.SIGQUIT, lambda *_: None)
    NUMBERS.append(7)  # what an import in a new process would not have
    queue = mp.Queue()
    process = mp.Process(target=child, args=(queue,))
    process.start()
    assert queue.get(timeout=60) == (os.getpid(), [7], "spawn", True)
    process.join()
"""


def test_a_process_has_what_its_parent_has_imported_and_spawns_its_own(tmp_path):
    result = run(tmp_path, PROGRAM.format(thread=""))
    assert result.returncode == 0, result.stderr


def test_no_fork_beside_a_thread(tmp_path):
    result = run(
        tmp_path, PROGRAM.format(thread="threading.Thread(target=threading.Event().wait, daemon=True).start()")
    )
    assert result.returncode == 1 and "AssertionError: spawn was chosen with these threads" in result.stderr


def run(folder, program):
    path = folder / "program.py"
    path.write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(Path(miles.__file__).parents[1])}
    return subprocess.run([sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=60)
