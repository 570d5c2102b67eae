"""What a run needs on the disk: the checkpoint and the prompts. A step whose result is whole is skipped."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.plan import ROOT, Plan
from launcher.tasks import DataFile
from miles.utils.errors import UserError


@dataclass(frozen=True)
class Step:
    """Commands with a result.

    Args:
        title: of the result.
        command: what makes it; what was there in part is gone on with, or overwritten.
        missing: what of the result is not there; None: it is whole.
    """

    title: str
    command: list[str]
    missing: Callable[[], str | None]


def steps(plan: Plan) -> list[Step]:
    """All steps of a plan, in their order."""
    return [checkpoint_step(plan), *copy_steps(plan), *(data_step(plan, file) for file in plan.task.files)]


def checkpoint_step(plan: Plan) -> Step:
    """The Hugging Face folder."""
    folder, model = plan.downloaded, plan.model
    if plan.options.hf_checkpoint:
        command: list[str] = []
    elif model.make:
        command = [sys.executable, *model.make(str(folder))]
    else:
        command = ["hf", "download", model.repository, "--local-dir", str(folder)]
    return Step(f"checkpoint {folder}", command, lambda: missing_of_checkpoint(folder))


def copy_steps(plan: Plan) -> list[Step]:
    """With --model-local-dir, the checkpoint's copy on this node's disk; each node makes its own."""
    source, target = plan.downloaded, plan.checkpoint
    if target == source:
        return []
    copy = shlex.join(["mkdir", "-p", str(target)]) + " && " + shlex.join(["cp", "-rT", str(source), str(target)])
    return [Step(f"copy {target}", ["bash", "-c", copy], lambda: missing_of_checkpoint(target))]


def data_step(plan: Plan, file: DataFile) -> Step:
    """A file of prompts."""
    path = plan.data_file(file.folder, file.path)
    if file.make:
        command = [sys.executable, *file.make(str(path))]
    else:
        assert file.repository
        command = ["hf", "download", file.repository, "--repo-type", "dataset", "--local-dir", str(path.parent)]
    # Both write elsewhere first, or in one go: a file that is there is whole.
    return Step(f"prompts {path}", command, lambda: None if path.is_file() else f"{path} is not there")


def missing_of_checkpoint(folder: Path) -> str | None:
    """What a run would miss in a Hugging Face folder; the weights' files are looked at by their headers and sizes."""
    from miles.hf.checkpoint import CheckpointIndex

    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            return f"{folder / name} is not there"
    try:
        CheckpointIndex(folder)
    except UserError as error:
        return str(error)
    return None


def run_steps(todo: list[Step], dry_run: bool) -> None:
    """Make what is missing, or print how. Raises UserError where a command fails, or leaves its result unfinished."""
    for step in todo:
        if step.missing() is None:
            print(f"# {step.title}: there", flush=True)
            continue
        if not step.command:
            raise UserError(f"--hf-checkpoint: {step.missing()}")
        _execute(step.command, dry_run)
        if not dry_run and (missing := step.missing()):
            raise UserError(f"{shlex.join(step.command)} ended well, and yet {missing}")


def _execute(command: list[str], dry_run: bool) -> None:
    """Print a command and run it in the repository. Raises UserError where it fails."""
    print(shlex.join(command), flush=True)
    if dry_run:
        return
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # `hf` beside python
    code = subprocess.run(command, cwd=ROOT, env=os.environ | {"PATH": path}).returncode
    if code:
        raise UserError(f"exit code {code} of: {shlex.join(command)}")
