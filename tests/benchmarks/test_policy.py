"""Policies side by side: the report has everybody, and what must hold of it by construction."""

import gzip
import json
import random
from pathlib import Path

import pytest

from benchmarks.policy import trace_comparison as module
from benchmarks.policy.alternative_policies import scheduled
from benchmarks.policy.comparison import PolicyOptions, compare_policies
from benchmarks.policy.contenders import CONTENDERS
from benchmarks.policy.tables import LOADS, ORACLE, ORACLE_LOAD, OURS
from mars_ray.control.cluster_load import ClusterLoad
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.policies.policy import Bounds
from mars_ray.errors import ConfigError


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two minutes with a burst in the middle."""
    source, now_s, lines = random.Random(0), 0.0, ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    while now_s < 120:
        now_s += source.expovariate(8.0 if 50 < now_s < 60 else 2.0)
        lines.append(f"2023-11-16 18:{int(now_s // 60):02}:{now_s % 60:010.7f},{source.randint(8, 900)},60")
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


@pytest.mark.slow
def test_the_report_has_everybody_at_every_load(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "SEARCH_STEPS", 1)
    report = compare_policies(PolicyOptions(traces=(trace,), rows=8))
    [found] = report["traces"].values()
    assert list(found["loads"]) == [str(load) for load in LOADS]
    for load, by_name in found["loads"].items():
        assert list(by_name) == [*CONTENDERS, *([ORACLE] if load == str(ORACLE_LOAD) else [])]
        assert by_name["fixed 1.0"]["accuracy"] >= max(figures["accuracy"] for figures in by_name.values())
    assert set(found["dominated"]) == {str(load) for load in LOADS}
    assert found["largest_load"]["fixed 1.0"] == 1.0
    assert set(report["steady"]) == {"batch table", "EMA, hysteresis", OURS}
    assert OURS in capsys.readouterr().out
    json.dumps(report, allow_nan=False)


def test_a_schedule_is_followed_window_by_window() -> None:
    plan, bounds = ControlPlan(ceiling=1.0), {"standard": Bounds(0.5, 1.0, 0.5)}
    idle = ClusterLoad(replicas=1, classes=(), speed=None, rows=1, ttft_p95_s=None, tpot_p95_s=None)
    policy, seen = scheduled((0.9, 0.7, 1.0), 10.0), []
    state = policy.initial
    for second in range(30):
        decisions, state = policy.decide(plan, idle, bounds, state, 1.0 if second else 0.0)
        seen.append(decisions["standard"].threshold)
    assert seen == [0.9] * 9 + [0.7] * 10 + [1.0] * 11


def test_without_a_trace_or_a_slo_there_is_nothing_to_compare(trace: Path) -> None:
    with pytest.raises(ConfigError, match="no trace"):
        compare_policies(PolicyOptions(traces=()))
    with pytest.raises(ConfigError, match="slo is empty"):
        compare_policies(PolicyOptions(traces=(trace,), slo=()))
