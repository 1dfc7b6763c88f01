"""Fixtures the tests share."""

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from openai import OpenAI
from transformers import PreTrainedModel
from upath import UPath
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from mars_ray.cli.main import main
from mars_ray.installed import HAS_PLATFORM
from mars_ray.storage.location import locate_url
from tests.factories.networks import network_of_rows
from tests.factories.tokenizers import save_chat_model
from tests.samples import Cli
from tests.serve.endpoint_samples import Keyed, Served, config_of, served
from tests.serve.key_samples import add_key
from tests.store_server import free_port, store_server, use_store
from tests.training.train_samples import RECORDS

# Fixtures are networks that no test changes, and two busy cores keep no deadline.
for profile, examples in {"default": 15, "nightly": 200}.items():
    settings.register_profile(
        profile, max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Without the folder of the platform, the core's tests must pass.
collect_ignore = [] if HAS_PLATFORM else ["platform"]

# `make test` runs two processes on two cores: a thread each, for them and for what they start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# Known before Ray starts, whose workers have the environment of its start; whoever needs the store starts it.
STORE_PORT = free_port()
use_store(STORE_PORT)

# Ray Serve kills a proxy that is not up after three times so long, and gives up after a minute.
os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "60"
# Otherwise, Ray's workers have a lower priority than other work on this machine.
os.environ |= {"RAY_worker_niceness": "0"}


# What is collected stays, so looking through it for garbage would only take time: a fifth of that of collecting.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


class _RayTogether(LoadFileScheduling):  # type: ignore[misc]
    """A file's tests run in one process and share fixtures; so do all files that start Ray: one cluster at a time."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "ray" if "mark.ray" in (self.config.rootpath / file).read_text() else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _RayTogether:
    return _RayTogether(config, log)


def _uses_cluster(item: pytest.Item | None) -> bool:
    return isinstance(item, pytest.Function) and "cluster" in item.fixturenames


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with Ray, which takes longest, and there with those that share a cluster. Skip tests that need the platform
    where its folder is gone."""
    for item in items:
        if not HAS_PLATFORM and item.get_closest_marker("platform"):
            item.add_marker(pytest.mark.skip(reason="needs the platform"))
    items.sort(key=lambda item: (item.get_closest_marker("ray") is None, not _uses_cluster(item)))


@pytest.hookimpl(trylast=True)  # what fixtures end on the cluster, they end before
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the cluster before a test that does not share it: it would take time from it, or start another."""
    if _uses_cluster(item) and not _uses_cluster(nextitem):
        import ray

        ray.shutdown()


@pytest.fixture(scope="module")
def cluster() -> None:
    """A Ray cluster of two CPUs, and two GPUs by name, shared by all files whose tests all use it."""
    import ray

    if not ray.is_initialized():
        ray.init(
            address="local",
            num_cpus=2,
            num_gpus=2,
            include_dashboard=False,
            object_store_memory=200_000_000,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )


@pytest.fixture(scope="session")
def s3_store() -> Iterator[None]:
    """An S3 store in a process of its own."""
    with store_server(STORE_PORT):
        yield


@pytest.fixture
def bucket(s3_store: None, request: pytest.FixtureRequest) -> UPath:
    """A bucket of the test's own in the store."""
    place = locate_url(f"s3://test-{abs(hash(request.node.nodeid))}/")
    place.fs.mkdir(place.path)
    return place


@pytest.fixture
def mars_ray(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command line, run here: a process of its own would import torch and Ray for five seconds."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mars-ray", *map(str, words)])
        capsys.readouterr()  # what was printed before is not the command's
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        code = ended.value.code or 0
        assert isinstance(code, int)
        return code, *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def network() -> PreTrainedModel:
    """A two-layer Qwen2 with random weights, large enough that its logits differ."""
    return network_of_rows()


@pytest.fixture(scope="session")
def start_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random weights to train from."""
    texts = [text for record in RECORDS for text in record.values()]
    return save_chat_model(tmp_path_factory.mktemp("model") / "start", texts, vocabulary=270)


@pytest.fixture(scope="session")
def endpoint() -> Iterator[Served]:
    """Without keys; tests must leave nothing in flight."""
    with served(config_of()) as running:
        yield running


@pytest.fixture(scope="session")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    """The bundled model knows no tools, so that a system message describes them."""
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys = add_key(path, "ada", "use"), add_key(path, "bob", "operate")
    with served(config_of(keys=path, tool_call_parser="hermes")) as running:
        clients = [OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0) for key in keys]
        with clients[0] as ada, clients[1] as bob:
            yield Keyed(running, keys, ada, bob)
