"""One Ray for all tests of this folder."""

import pytest
import ray


@pytest.fixture(scope="package")
def local_ray():
    """A Ray of two logical CPUs, without a dashboard."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()
