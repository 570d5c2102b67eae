"""What a run that fails says, and what it leaves in its folder. The runs here fail in this process."""

import re
import sys

import pytest
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from miles.config import RunConfig
from miles.ray.failure import inside, written_down
from miles.utils.errors import UserError, sentence_of

pytestmark = pytest.mark.real


@pytest.fixture
def config(tmp_path):
    return RunConfig.model_construct(run_dir=str(tmp_path / "run"), sglang={"api_key": "very-secret"})


def end(config, error, capsys):
    """The last line on the screen, the lines before it, and error.log."""
    with pytest.raises(SystemExit) as caught, written_down(config):
        raise error
    assert caught.value.code == 1
    *lines, last = capsys.readouterr().err.splitlines()
    path = f"{config.run_dir}/error.log"
    assert last.endswith(path)
    with open(path) as file:
        return "\n".join(lines), file.read()


def test_a_fault_of_the_program_shows_its_traceback(config, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--sglang-api-key", "very-secret", "--rm-url", "http://me:pw@host"])
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    try:
        dict(zip("ab", [1], strict=True))
    except ValueError as error:
        error.add_note("the engine at http://me:pw@host has very-secret and 0123456789abcdef")
        shown, log = end(config, error, capsys)
    for text in (shown, log):
        assert "Traceback (most recent call last)" in text and "in test_a_fault_of_the_program" in text
        assert "ValueError: zip() argument 2 is shorter than argument 1\nthe engine at http://***@host has ***" in text
        assert not re.search("very-secret|0123456789abcdef|me:pw", text)
    assert f"command: {sys.executable} train.py --sglang-api-key '***' --rm-url 'http://***@host'" in log
    assert re.search(r"^time: \d{4}-\d\d-\d\dT", log) and re.search(r"^versions: Python 3.*, ray 2", log, re.M)


def test_a_users_mistake_shows_its_sentence(config, capsys):
    error = UserError("give less")
    error.add_note("trainer rank 1 failed too")
    shown, log = end(config, error, capsys)
    assert shown == "error: give less\ntrainer rank 1 failed too"
    assert "in end\n" in log and "UserError: give less" in log
    _, log = end(config, KeyError("x"), capsys)
    assert log.count("time: ") == 2, "a later run in the folder adds to it"


def test_a_folder_that_cannot_be_written_to_is_said(config, tmp_path, capsys):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(SystemExit), written_down(config):
        raise UserError("give less")
    sentence, last = capsys.readouterr().err.splitlines()
    assert sentence == "error: give less" and "could not be written: [Errno" in last


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(15)], ids=["Ctrl-C", "SIGTERM"])
def test_an_end_that_was_asked_for_is_no_failure(config, tmp_path, error):
    with pytest.raises(type(error)) as caught, written_down(config):
        raise error
    assert caught.value is error and not (tmp_path / "run").exists()


def test_what_ray_wraps():
    refused = UserError("give less")
    refused.add_note("of 3")
    task_error = RayTaskError("f", "Traceback ...", refused, proctitle="p", pid=1, ip="10.0.0.1")
    for error in (task_error, task_error.as_instanceof_cause(), task_error.as_instanceof_cause().as_instanceof_cause()):
        assert inside(error) is refused
        assert sentence_of(error, inside) == "give less\nof 3"
    late = task_error.as_instanceof_cause()
    late.add_note("trainer rank 1 failed too")
    assert sentence_of(ExceptionGroup("", [late]), inside) == "give less\nof 3\ntrainer rank 1 failed too"
    both = ExceptionGroup("", [UserError("give more"), UserError("and less")])
    wrapped = RayTaskError("f", "Traceback ...", both, proctitle="p", pid=1, ip="10.0.0.1").as_instanceof_cause()
    assert sentence_of(wrapped, inside) == "give more\nand less"
    lost = RayError("lost")
    lost.__cause__ = UserError("give less")
    assert sentence_of(lost, inside) == "give less"
    for fault in (ActorDiedError(), RayTaskError("f", "T", KeyError("x"), proctitle="p", pid=1, ip="10.0.0.1")):
        assert sentence_of(fault, inside) is None
