"""One Ray for all tests that use it in their own process."""

import pytest
import ray


@pytest.fixture(scope="session")
def local_ray():
    """A Ray of four logical CPUs, which every test leaves free, without a dashboard."""
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
