"""`capacity` against constant thresholds: what it gives up of accuracy for requests in time."""

import gzip
import random
from pathlib import Path
from typing import Any

import pytest

from mars_ray.simulate.command import SimulateOptions, run_simulation

GPU = "l4/qwen2.5-7b"
SLO = {None: "ttft:1000,tpot:30", GPU: "ttft:1000,tpot:60"}
"""The SLO by machine; None is the machine in the package."""
CONSTANTS = (1.0, 0.98, 0.95, 0.9, 0.8)
SAME = 0.005
"""Shares of requests in time that count as one promise."""
MOST = 0.003
"""Share of right answers that may be given up against the best constant of the same promise."""


def written_trace(folder: Path, requests_s: float) -> Path:
    """Write 100 seconds of short prompts and answers, with a burst of a quarter more in each half minute."""
    source, now_s, lines = random.Random(0), 0.0, ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    while now_s < 100:
        now_s += source.expovariate(requests_s * (1.25 if now_s % 30 < 8 else 1.0))
        prompt, answer = 1 + int(source.expovariate(1 / 230)), 1 + int(source.expovariate(1 / 42))
        lines.append(f"2023-11-16 18:{int(now_s // 60):02}:{now_s % 60:010.7f},{prompt},{answer}")
    path = folder / "trace.csv.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def measured(folder: Path, machine: str | None, trace: Path, policy: str, ceiling: float) -> tuple[float, float]:
    """Return the share of requests in time, and of right answers."""
    control = folder / "control.yaml"
    control.write_text(
        f"{{ceiling: {ceiling}, settings: {{max_accuracy_loss: 0.05}}, classes: [{{floor: {min(0.8, ceiling)}}}]}}"
    )
    options: dict[str, Any] = {"slo": (SLO[machine],), "ticks": 20, "control": control, "policy": policy}
    found = run_simulation(SimulateOptions(machine=machine, trace=str(trace), replicas=1, **options))["metrics"]
    return found["good"], found["accuracy"]


@pytest.mark.parametrize(
    ("machine", "requests_s"),
    [(None, 18.0), (None, 24.0), (GPU, 22.0), (GPU, 32.0)],
    ids=["kept by the ceiling on a CPU", "lost on a CPU", "kept by the ceiling on a GPU", "lost on a GPU"],
)
def test_capacity_gives_up_no_accuracy_that_a_constant_of_the_same_promise_keeps(
    tmp_path: Path, machine: str | None, requests_s: float
) -> None:
    trace = written_trace(tmp_path, requests_s)
    good, accuracy = measured(tmp_path, machine, trace, "capacity", 1.0)
    constants = [measured(tmp_path, machine, trace, "fixed", each) for each in CONSTANTS]
    same = [right for in_time, right in constants if abs(in_time - good) <= SAME]
    # Where no constant keeps as much of the promise, none that keeps more may be as good.
    better = [right for in_time, right in constants if in_time > good + SAME]
    assert accuracy >= max([*same, *better]) - MOST


def test_capacity_keeps_the_promise_that_the_ceiling_loses(tmp_path: Path) -> None:
    trace = written_trace(tmp_path, 32.0)
    ceiling, capacity = (measured(tmp_path, GPU, trace, policy, 1.0)[0] for policy in ("fixed", "capacity"))
    assert capacity > ceiling + 0.04
