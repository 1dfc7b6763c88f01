"""The bundled model and a few of its requests, once for all tests of the benchmarks."""

import pytest

from mars_ray.bench.workload import Workload, bundled_workload
from mars_ray.model.checkpoint import Checkpoint, load_checkpoint
from mars_ray.model.resolve import resolve_model


@pytest.fixture(scope="session")
def bundled() -> Checkpoint:
    return load_checkpoint(resolve_model("bundled"))


@pytest.fixture(scope="session")
def workload(bundled: Checkpoint) -> Workload:
    return bundled_workload(bundled, 12, seed=0)
