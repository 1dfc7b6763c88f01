"""A tiny real model with a chat template, in a folder and in memory."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from mars_ray.batch.output import job_log
from mars_ray.model.checkpoint import Checkpoint, load_checkpoint
from mars_ray.storage import driver_lease
from tests.factories.tokenizers import save_chat_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random weights, 128 positions and a tokenizer of bytes: a prompt has a token per byte and three."""
    # Logits differ, so that no rounding changes which is the largest.
    return save_chat_model(tmp_path_factory.mktemp("model") / "tiny", initializer_range=0.5)


@pytest.fixture(scope="session")
def checkpoint(model_folder: Path) -> Checkpoint:
    """What is in the folder; no test changes it."""
    return load_checkpoint(model_folder)


@pytest.fixture
def sigint() -> Iterator[None]:
    """Python's handler of SIGINT, which programs in the background of a shell lack."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver is gone after a second."""
    monkeypatch.setattr(driver_lease, "LEASE_S", 1.0)
    monkeypatch.setattr(driver_lease, "POLL_S", 0.1)


@pytest.fixture
def manual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing happens by itself."""
    monkeypatch.setattr(job_log, "COMMIT_S", 1000.0)
    monkeypatch.setattr(driver_lease, "RENEW_S", 1000.0)
