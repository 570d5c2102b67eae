"""Traces of what a rank computes, by torch's profiler (--use-pytorch-profiler)."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from miles.config import RunConfig
from miles.config.debug import ProfileTarget
from miles.utils.disk import writing


@contextlib.contextmanager
def profiled(config: RunConfig, target: ProfileTarget, rollout_id: int, rank: int) -> Iterator[None]:
    """Around one target of a rollout: writes its trace, if one is asked for, to `profile/` in the run's folder.

    Raises:
        ValueError: the trace can't be written, with the folder and the bytes that are free there.
    """
    steps = range(config.profile_step_start, config.profile_step_end)
    if not config.use_pytorch_profiler or target not in config.profile_target or rollout_id not in steps:
        yield
        return
    on_gpu = [ProfilerActivity.CUDA] if config.device == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *on_gpu]) as trace:
        yield
    assert config.run_dir is not None, "it is derived where it is not given"
    folder = Path(config.run_dir) / "profile"
    with writing("--run-dir", folder):
        folder.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(folder / f"{target}_{rollout_id}_rank{rank}.json.gz"))
