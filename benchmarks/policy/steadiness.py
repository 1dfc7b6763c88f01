"""Measure the steadiness of thresholds: changes under steady load, and the time to full quality after a peak."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.policy.contenders import CONTENDERS
from benchmarks.policy.simulation_pool import SimulationJob, SimulationPool
from benchmarks.policy.trace_comparison import BUSY_SHARE, estimate_full_speed
from mars_ray.simulate.arrivals import Arrival

STEADY_S = 600.0
PEAK_S = 120.0


def compare_steadiness(pool: SimulationPool) -> dict[str, Any]:
    """Return the changes per minute under steady load, and the time to full quality after a peak."""
    setup = pool.setup
    report = {}
    sizes = (120, 120)
    rate = estimate_full_speed(setup, tuple(Arrival(float(n), *sizes) for n in range(100))) / BUSY_SHARE
    shapes = {
        "steady 0.6": [(STEADY_S, 0.6)],
        "steady 0.9": [(STEADY_S, 0.9)],
        "peak": [(200.0, 0.5), (PEAK_S, 1.15), (300.0, 0.4)],
    }
    names = [name for name, contender in CONTENDERS.items() if contender.alternative or contender.policy != "fixed"]
    jobs = [
        SimulationJob(contender=name, arrivals=tuple(_poisson(shape, rate, sizes, setup.seed)))
        for name in names
        for shape in shapes.values()
    ]
    results = dict(zip([(name, shape) for name in names for shape in shapes], pool.all(jobs), strict=True))
    for name in names:
        peak = results[name, "peak"]
        after = [second for second in peak.seconds if second.second > 200 + PEAK_S and second.threshold is not None]
        low = [second.second for second in after if (second.threshold or 0.0) < 1.0 - 1e-9]
        report[name] = {
            "changes_per_minute": {
                shape: results[name, shape].metrics.threshold_changes_per_minute for shape in shapes if shape != "peak"
            },
            "back_at_full_quality_s": (max(low) - 200 - PEAK_S) if low else 0.0,
            "good_in_peak": peak.metrics.good,
        }
    return report


def _poisson(shape: Sequence[tuple[float, float]], rate: float, sizes: tuple[int, int], seed: int) -> Iterator[Arrival]:
    source = random.Random(seed)
    begin_s = 0.0
    for seconds, load in shape:
        now_s = begin_s
        while (now_s := now_s + source.expovariate(rate * load)) < begin_s + seconds:
            yield Arrival(now_s, *sizes)
        begin_s += seconds
