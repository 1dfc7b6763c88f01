"""The bundled model and a few of its requests, once for all tests of the benchmarks."""

from collections.abc import Iterator

import pytest

from mars_ray.bench.decode.workload import Workload, bundled_workload
from mars_ray.model.checkpoint import Checkpoint, load_checkpoint
from mars_ray.model.resolve import resolve_model
from tests.bench.serve_samples import SmallServer, serving


@pytest.fixture(scope="session")
def bundled() -> Checkpoint:
    return load_checkpoint(resolve_model("bundled"))


@pytest.fixture(scope="session")
def workload(bundled: Checkpoint) -> Workload:
    return bundled_workload(bundled, 12, seed=0)


@pytest.fixture
def server() -> SmallServer:
    return SmallServer()


@pytest.fixture
def url(server: SmallServer) -> Iterator[str]:
    with serving(server) as found:
        yield found
