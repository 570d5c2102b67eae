"""A script's command line: prepare, train, full-train, check; without one of them, full-train."""

import inspect
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any

import typer

from launcher import cluster, job
from launcher.options import Options, variable_of
from launcher.plan import Plan
from launcher.prepare import run_steps, steps
from launcher.recipe import Recipe
from miles.utils.errors import UserError, ends_in_a_sentence

Action = Callable[[Plan], None]


def prepare(plan: Plan) -> None:
    """Download or make what is missing: checkpoint and prompts."""
    run_steps(steps(plan), plan.options.dry_run)


def train(plan: Plan) -> None:
    """Start or join a Ray cluster, and run train.py on it as a job."""
    address = cluster.address_to_join(plan)
    if plan.options.dry_run:
        if address is None:
            print(shlex.join(cluster.head_command(plan)))
        print(job.submit_command(plan, address or cluster.dashboard_of(plan)))
        return
    if plan.model.waits_for:
        raise UserError(f"{plan.model.name} cannot be trained yet: {plan.model.waits_for}")
    if address is not None:
        job.submit(plan, address)
    elif cluster.slurm_rank():
        cluster.work_for(plan, cluster.slurm_head())
    else:
        with cluster.started(plan) as (dashboard, head):
            job.submit(plan, dashboard, head)


def full_train(plan: Plan) -> None:
    """Prepare, then train. Of a SLURM job's nodes the first prepares, on a disk that all see."""
    if not cluster.slurm_rank():
        prepare(plan)
    train(plan)


def check(plan: Plan) -> None:
    """Say whether the run fits its hardware, without a GPU: memory of each phase and time, or what is wrong."""
    command = [*plan.train_command(), "--check", "--check-hardware", plan.hardware]
    print(shlex.join(command), flush=True)
    if not plan.options.dry_run:
        sys.exit(subprocess.run(command).returncode)


ACTIONS: Mapping[str, Action] = {"prepare": prepare, "train": train, "full-train": full_train, "check": check}
DEFAULT = "full-train"


def main(recipe: Recipe, actions: Mapping[str, Action] = {}) -> None:
    """Run a script: one of ACTIONS or of `actions`, with options."""
    words = sys.argv[1:]
    if not words or (words[0].startswith("-") and words[0] != "--help"):
        words = [DEFAULT, *words]
    with ends_in_a_sentence():
        app_of(recipe, {**ACTIONS, **actions})(words)


def app_of(recipe: Recipe, actions: Mapping[str, Action]) -> typer.Typer:
    """The command line of a script."""
    names = ", ".join(model.name for model in recipe.models)
    app = typer.Typer(
        help=f"{recipe.title}: {names}. Without a subcommand: {DEFAULT}.",
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for name, action in actions.items():
        app.command(name)(_command(recipe, action))
    return app


def _command(recipe: Recipe, action: Action) -> Callable[..., None]:
    def run(**values: Any) -> None:
        action(Plan.of(recipe, Options(**values)))

    parameters = []
    for option in fields(Options):
        shown = typer.Option(help=option.metadata["help"], envvar=variable_of(option.name))
        default = option.default_factory() if option.default is MISSING else option.default
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(
            inspect.Parameter(option.name, kind, default=default, annotation=Annotated[option.type, shown])
        )
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__doc__ = action.__doc__
    return run
