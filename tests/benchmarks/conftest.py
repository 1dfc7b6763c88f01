"""The bundled model and a few requests to it, loaded once for all tests of the benchmarks."""

import pytest

from benchmarks.decode.workload import Workload, bundled_workload
from mars_ray.model.checkpoint import Checkpoint
from tests.factories.engine import bundled_checkpoint


@pytest.fixture(scope="session")
def bundled() -> Checkpoint:
    return bundled_checkpoint()


@pytest.fixture(scope="session")
def workload(bundled: Checkpoint) -> Workload:
    return bundled_workload(bundled, 12, seed=0)
