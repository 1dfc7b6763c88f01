"""The bundled model and an endpoint that serves it, once for all tests; keys that the access middleware knows."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mars_ray.model.checkpoint import Checkpoint, load_checkpoint
from mars_ray.model.resolve import resolve_model
from mars_ray.serve.middleware.keys import KeyFile, add_key
from tests.serve.access_samples import KnownKeys
from tests.serve.endpoint_samples import Served, config_of, served


@pytest.fixture(scope="session")
def bundled() -> Checkpoint:
    return load_checkpoint(resolve_model("bundled"))


@pytest.fixture(scope="session")
def endpoint() -> Iterator[Served]:
    """Without keys; tests must leave nothing in flight."""
    with served(config_of()) as running:
        yield running


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KnownKeys:
    path: Path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    names = [add_key(path, "ada", "use"), add_key(path, "root", "operate"), add_key(path, "bob", "use")]
    return KnownKeys(KeyFile(path, lambda: 0.0), *names)
