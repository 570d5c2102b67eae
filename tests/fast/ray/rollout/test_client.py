"""The driver's view of the RolloutManager and the manager itself have the same verbs."""

import inspect

from miles.ray.rollout.client import RolloutClient
from miles.ray.rollout.rollout_manager import RolloutManager


def test_the_managers_verbs_are_those_that_the_driver_knows():
    """By names, parameters and what is returned."""
    verbs = {name: verb for name, verb in vars(RolloutClient).items() if inspect.isfunction(verb) and name[0] != "_"}
    assert len(verbs) == 12
    for name, verb in verbs.items():
        # Ray adds a parameter of its own to a class that it has made an actor of.
        manager, client = inspect.signature(inspect.unwrap(getattr(RolloutManager, name))), inspect.signature(verb)
        parameters = [manager.parameters[key] for key in manager.parameters if key != "_ray_trace_ctx"]
        assert [p.name for p in parameters] == list(client.parameters), name
        assert [p.annotation for p in parameters] == [p.annotation for p in client.parameters.values()], name
        if name != "generate":  # its result is named by a string, since the driver does not load it
            assert manager.return_annotation == client.return_annotation, name
