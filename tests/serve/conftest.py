"""The bundled model, a cluster that serves it, and keys that the access middleware knows."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from mars_ray.model.checkpoint import Checkpoint
from tests.factories.engine import bundled_checkpoint
from tests.serve.access_samples import KnownKeys
from tests.serve.cluster_samples import CEILING, CLASSES, REQUESTS_MAX, SOON, Cluster, cluster, deploy_file
from tests.serve.endpoint_samples import Served
from tests.serve.key_samples import add_key, live_keys


@pytest.fixture(scope="session")
def bundled() -> Checkpoint:
    return bundled_checkpoint()


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
            "engine": {"max_num_seqs": 8, "max_waiting_seqs": 64},
            "model_wait_s": 5,
        },
        num_replicas=2,
    )
    with cluster("--config", str(config)) as started:
        started.until_engines(2)
        yield started


@pytest.fixture(scope="module")
def client(endpoint: Served) -> Iterator[OpenAI]:
    """OpenAI's client of the shared endpoint; it never tries again."""
    with OpenAI(base_url=f"{endpoint.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KnownKeys:
    path: Path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    names = [add_key(path, "ada", "use"), add_key(path, "root", "operate"), add_key(path, "bob", "use")]
    return KnownKeys(live_keys(path, lambda: 0.0), *names)
