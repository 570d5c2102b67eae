"""When a run is evaluated, and what the report gets of it."""

from contextlib import contextmanager

import pytest

from miles.config import RunConfig
from miles.ray.evaluations import Evaluations


class Rollout:
    """Stands for the client of a RolloutManager; writes down what it evaluates into `said`."""

    def __init__(self, said):
        self.said = said

    async def evaluate(self, rollout_id, before_training):
        self.said.append(f"evaluate {rollout_id}{' before training' if before_training else ''}")
        return {"eval/demo": rollout_id}


class Report:
    """Writes down what it is told into `said`."""

    def __init__(self, said):
        self.said = said

    @contextmanager
    def timer(self, phase):
        self.said.append(f"{phase} begins")
        yield
        self.said.append(f"{phase} ends")

    def before_training(self, metrics):
        self.said.append(f"before training {metrics}")

    def evaluation(self, step, metrics):
        self.said.append(f"of step {step} {metrics}")

    def add(self, metrics):
        self.said.append(f"add {metrics}")


def evaluations_of(**flags):
    said = []
    config = RunConfig.model_construct(**(RunConfig.model_construct().model_dump() | {"num_rollout": 5} | flags))
    return Evaluations(config, Rollout(said), Report(said)), said


async def test_a_new_run_is_evaluated_before_it_trains():
    evaluations, said = evaluations_of(eval_interval=2)
    await evaluations.before_training(0)
    assert said == ["evaluate 0 before training", "before training {'eval/demo': 0}"]


@pytest.mark.parametrize(
    ("first_rollout", "flags"),
    [(1, {}), (0, {"skip_eval_before_train": True}), (0, {"eval_interval": None})],
)
async def test_no_evaluation_before_training(first_rollout, flags):
    evaluations, said = evaluations_of(**({"eval_interval": 2} | flags))
    await evaluations.before_training(first_rollout)
    assert said == []


@pytest.mark.parametrize(("first_rollout", "step"), [(0, 0), (5, 4)])
@pytest.mark.parametrize("eval_interval", [None, 2])
async def test_an_evaluation_alone_is_that_of_the_step_whose_weights_it_has(first_rollout, step, eval_interval):
    evaluations, said = evaluations_of(num_rollout=0, eval_interval=eval_interval)
    await evaluations.before_training(first_rollout)
    assert said == ["eval begins", f"evaluate {step}", "eval ends", f"of step {step} {{'eval/demo': {step}}}"]


async def test_what_comes_of_an_evaluation_belongs_to_its_step():
    evaluations, said = evaluations_of(eval_interval=2)
    await evaluations.after(3)
    assert said == ["eval begins", "evaluate 3", "add {'eval/demo': 3}", "eval ends"]
