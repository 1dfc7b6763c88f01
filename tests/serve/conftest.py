"""The bundled model and an endpoint that serves it, once for all tests; keys that the access middleware knows."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import OpenAI

from mars_ray.model.checkpoint import Checkpoint
from tests.factories.engine import bundled_checkpoint
from tests.serve.access_samples import KnownKeys
from tests.serve.cluster_samples import CEILING, CLASSES, REQUESTS_MAX, SOON, Cluster, cluster, deploy_file
from tests.serve.endpoint_samples import Served, config_of, served
from tests.serve.key_samples import add_key, live_keys


@pytest.fixture(scope="session")
def bundled() -> Checkpoint:
    return bundled_checkpoint()


@pytest.fixture(scope="session")
def endpoint() -> Iterator[Served]:
    """Without keys; tests must leave nothing in flight."""
    with served(config_of()) as running:
        yield running


@dataclass(frozen=True)
class Keyed:
    """An endpoint with the keys of two callers, and OpenAI's client for each."""

    served: Served
    keys: tuple[str, str]
    ada: OpenAI
    bob: OpenAI


@pytest.fixture(scope="session")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    """The bundled model knows no tools, so that a system message describes them."""
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys = add_key(path, "ada", "use"), add_key(path, "bob", "operate")
    with served(config_of(keys=path, tool_call_parser="hermes")) as running:
        clients = [OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0) for key in keys]
        with clients[0] as ada, clients[1] as bob:
            yield Keyed(running, keys, ada, bob)


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """`mars-ray serve` with two engines of eight rows each, whose threshold stays where operators set it."""
    config = deploy_file(
        tmp_path_factory.mktemp("serve") / "serve.yaml",
        {
            "threshold": CEILING,
            "classes": CLASSES,
            "control": {"policy": "fixed"} | SOON,
            "limits": {"requests": REQUESTS_MAX, "requests_per_key": REQUESTS_MAX},
            "engine": {"max_num_seqs": 8, "max_waiting_seqs": 64, "compiled": False},
        },
        num_replicas=2,
    )
    with cluster("--config", str(config)) as started:
        started.until_engines(2)
        yield started


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KnownKeys:
    path: Path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    names = [add_key(path, "ada", "use"), add_key(path, "root", "operate"), add_key(path, "bob", "use")]
    return KnownKeys(live_keys(path, lambda: 0.0), *names)
