"""Models for the harness, each loaded once, and the plain network that judges them."""

import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import pytest

from mars_ray.harness.model import HarnessModel
from mars_ray.model.checkpoint import Checkpoint
from tests.factories.engine import bundled_checkpoint
from tests.factories.tokenizers import save_tiny_model
from tests.harness.harness_samples import MakeModel


@pytest.fixture(autouse=True)
def nothing_leaves_this_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    look_up, asked = socket.getaddrinfo, []

    def watched(host: object, *arguments: Any, **options: Any) -> Any:
        if host not in (None, "127.0.0.1", "localhost"):
            asked.append(host)
            raise OSError(f"{host} is not here")
        return look_up(host, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", watched)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)  # as HF_HUB_OFFLINE=1; else it counts its users
    yield
    assert asked == []


@pytest.fixture(scope="session")
def oracle() -> Checkpoint:
    return bundled_checkpoint()


@pytest.fixture(scope="session")
def make_model() -> MakeModel:
    """The same arguments give the same model: tests ask of it what leaves no trace in answers."""
    return cache(lambda **arguments: HarnessModel(**({"model": "bundled"} | arguments)))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network of 64 positions with random weights."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))
