"""Fixtures the tests share."""

import logging
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import httpcore2
import httpx2
import pytest
import torch
from openai import OpenAI
from transformers import PreTrainedModel
from upath import UPath

from mars_ray.cli.main import main
from mars_ray.storage.location import locate_url
from tests.conftest import STORE_PORT
from tests.factories.networks import network_of_rows
from tests.factories.tokenizers import save_chat_model
from tests.samples import Cli
from tests.serve.endpoint_clients import http
from tests.serve.endpoint_samples import Keyed, Served, config_of, served
from tests.serve.key_samples import add_key
from tests.serve.shared_documents import share_documents
from tests.store_server import store_server
from tests.training.train_samples import RECORDS

# `make test` runs two processes on two cores: a thread each.
torch.set_num_threads(1)
share_documents()
# Otherwise, each HTTP client would read the certificates of all authorities again, which takes 35 ms.
httpcore2.default_ssl_context = cache(httpcore2.default_ssl_context)


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


@pytest.fixture(scope="module")
def plain(endpoint: Served) -> Iterator[httpx2.Client]:
    """A plain HTTP client of the shared endpoint."""
    with http(endpoint) as client:
        yield client


@pytest.fixture(scope="session")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    """The bundled model knows no tools, so that a system message describes them."""
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys = add_key(path, "ada", "use"), add_key(path, "bob", "operate")
    with served(config_of(keys=path, tool_call_parser="hermes")) as running:
        clients = [OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0) for key in keys]
        with clients[0] as ada, clients[1] as bob:
            yield Keyed(running, keys, ada, bob)
