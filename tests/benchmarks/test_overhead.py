"""What serving costs: a real endpoint and its engine in turns."""

import json
from typing import Any

import pytest

from benchmarks.serve_overhead import bench_overhead
from mars_ray.engine.options import EngineOptions
from mars_ray.errors import ConfigError, RunError
from tests.serve.endpoint_samples import Served


def test_endpoint_and_engine_decode_the_same_tokens(endpoint: Served, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench_overhead(endpoint.url, "bundled", 4, 12, 1, 0, EngineOptions())
    tokens = {name: [sample["tokens"] for sample in runs] for name, runs in report["samples"].items()}
    assert list(tokens) == ["served, not streamed", "served, streamed", "engine alone"]
    # Cuts of threshold mode may move with the load, and an answer with them.
    assert tokens["served, not streamed"][0] == pytest.approx(tokens["engine alone"][0], rel=0.1)
    assert report["ratios"]["served, not streamed"]["median"] > 0
    assert "of the engine alone" in capsys.readouterr().out
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize("name", ["clients", "requests", "rounds"])
def test_a_count_below_one_is_refused_by_its_name(name: str) -> None:
    counts: dict[str, Any] = {"clients": 1, "requests": 1, "rounds": 1, name: 0}
    with pytest.raises(ConfigError, match=f"{name} is 0"):
        bench_overhead("http://127.0.0.1:1", "bundled", **counts, seed=0)


def test_nobody_at_the_url_is_said() -> None:
    with pytest.raises(RunError, match="cannot be reached"):
        bench_overhead("http://127.0.0.1:1", "bundled", 1, 1, 1, 0)
