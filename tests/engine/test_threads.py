"""The threads of an engine in the process of a caller."""

from collections.abc import Iterator

import pytest
import torch

from mars_ray.engine.core import load
from mars_ray.engine.core.load import load_engine
from mars_ray.engine.options import EngineOptions
from mars_ray.model.folder import open_model


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("usable", "expected"), [(2, 2), (3, 3), (64, 3)])
def test_an_engine_has_no_more_threads_than_a_quota_pays_for(
    three_threads: None, monkeypatch: pytest.MonkeyPatch, usable: int, expected: int
) -> None:
    monkeypatch.setattr(load, "usable_cpus", lambda: usable)
    engine, _ = load_engine(open_model("bundled"), EngineOptions())
    engine.close()
    assert torch.get_num_threads() == expected
