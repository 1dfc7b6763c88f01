"""The bundled model and an endpoint that serves it, once for all tests."""

from collections.abc import Iterator

import pytest

from mars_ray.model.checkpoint import Checkpoint, load_checkpoint
from mars_ray.model.resolve import resolve_model
from tests.serve.endpoint_samples import Served, config_of, served


@pytest.fixture(scope="session")
def bundled() -> Checkpoint:
    return load_checkpoint(resolve_model("bundled"))


@pytest.fixture(scope="session")
def endpoint() -> Iterator[Served]:
    """Without keys; tests must leave nothing in flight."""
    with served(config_of()) as running:
        yield running
