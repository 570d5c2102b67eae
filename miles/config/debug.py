"""Looking into a run, and running one half of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from miles.config.effect import OnlyWith
from miles.config.paths import SAMPLE_FILE_ENDINGS, InputTemplate, OutputFile, OutputFolder
from miles.config.section import Derived, Section, derives, rule
from miles.config.values import Values

ProfileTarget = Literal["train_overall", "train_actor", "train_log_probs"]
WITH_PROFILER = OnlyWith("--use-pytorch-profiler")


class DebugConfig(Section):
    title: ClassVar[str] = "Debugging"

    save_debug_rollout_data: OutputFile | None = Field(
        None,
        description="File that each rollout's samples are written to, such as runs/a/rollout_{rollout_id}.jsonl, for "
        "python -m miles.tools.show_samples. Evaluations go beside it.",
    )
    dump_details: OutputFolder | None = Field(
        None,
        description="Folder of everything that can be looked into: as --save-debug-rollout-data "
        "FOLDER/rollout_data/{rollout_id}.jsonl.",
    )
    use_pytorch_profiler: bool = Field(
        False,
        description="Write a trace of each trainer rank and rollout from --profile-step-start to before "
        "--profile-step-end to profile/ in the run's folder, for ui.perfetto.dev.",
    )
    profile_step_start: Annotated[int, WITH_PROFILER] = Field(10, ge=0, description="First rollout with a trace.")
    profile_step_end: Annotated[int, WITH_PROFILER] = Field(
        12, gt=0, description="The rollout after the last with a trace."
    )
    profile_target: Annotated[list[ProfileTarget], WITH_PROFILER] = Field(
        ["train_overall"],
        min_length=1,
        description="What a trace is of: all of the actor's training, its optimizer steps, its log-probabilities.",
    )
    load_debug_rollout_data: InputTemplate | None = Field(
        None,
        description="Train on the files that --save-debug-rollout-data wrote instead of generating; no engine starts.",
    )


@derives("save_debug_rollout_data")
def _dumped(v: Values) -> Iterator[Derived]:
    if v.dump_details is not None and v.save_debug_rollout_data is None:
        yield "save_debug_rollout_data", f"{v.dump_details}/rollout_data/{{rollout_id}}.jsonl", "--dump-details"


@derives("save_debug_rollout_data")
def _not_with_loaded_samples(v: Values) -> Iterator[Derived]:
    if v.load_debug_rollout_data is not None and v.save_debug_rollout_data is not None:
        yield "save_debug_rollout_data", None, "--load-debug-rollout-data: no engine runs"


@rule
def _profile(v: Values) -> Iterator[str]:
    if not v.use_pytorch_profiler:
        return
    if v.profile_step_end <= v.profile_step_start:
        yield (
            f"--profile-step-end {v.profile_step_end} is not above --profile-step-start {v.profile_step_start}: no "
            "rollout would have a trace; give a larger one"
        )
    if "train_overall" in v.profile_target and len(v.profile_target) > 1:
        yield "--profile-target train_overall has the other targets in it; give it alone, or the others"


@rule
def _halves(v: Values) -> Iterator[str]:
    if v.debug_rollout_only and not v.needs_engines:
        yield (
            f"--debug-rollout-only starts no trainer and {v.without_engines} starts no engine: nothing is left "
            "to run; drop one"
        )
    if v.debug_train_only and v.learns_from_samples and v.load_debug_rollout_data is None:
        yield (
            f"--debug-train-only starts no engine, but {v.loss_type} learns from engines' samples; give "
            "--load-debug-rollout-data, the files of a run with --save-debug-rollout-data, or use --loss-type sft_loss"
        )


@rule
def _sample_files(v: Values) -> Iterator[str]:
    for flag, path in (
        ("--save-debug-rollout-data", v.save_debug_rollout_data),
        ("--load-debug-rollout-data", v.load_debug_rollout_data),
    ):
        if path is None:
            continue
        if set("{}") & set(path.replace("{rollout_id}", "")):
            yield f"{flag} {path}: the only thing in braces may be {{rollout_id}}"
        if not path.endswith(SAMPLE_FILE_ENDINGS):
            yield f"{flag} {path} must end in .jsonl, or in .jsonl.gz to be compressed"


@rule
def _saved(v: Values) -> Iterator[str]:
    path = v.save_debug_rollout_data
    if path is not None and "{rollout_id}" not in path:
        yield (
            f"--save-debug-rollout-data {path} has no {{rollout_id}}, so that each rollout would replace the file of "
            "the one before; give a path such as runs/a/rollout_{rollout_id}.jsonl"
        )


@rule
def _loaded(v: Values) -> Iterator[str]:
    path = v.load_debug_rollout_data
    if path is None or v.load is not None:  # a resumed run needs the files from its position on
        return
    # With --num-epoch the number of rollouts is not known yet.
    for rollout_id in range(1 if v.num_rollout is None else v.num_rollout):
        file = path.replace("{rollout_id}", str(rollout_id))
        if not Path(file).is_file():
            yield (
                f"--load-debug-rollout-data {path}: {file} is no file here; give the path that "
                f"--save-debug-rollout-data had, relative to the working directory {Path.cwd()}, and at most as many "
                "rollouts as it saved"
            )
            return
