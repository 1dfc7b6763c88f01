"""Plot a simulation: load, threshold, replicas, latency and quality over time.

If several seconds share a point, latencies show the worst of these seconds, and all other figures their mean.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from mars_ray.errors import ConfigError, OutputError
from mars_ray.simulate.metrics import SecondMetrics

POINTS = 600
SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raise a `ConfigError` for a file format that is not supported."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"plot is {path}; give a file that ends in {', '.join(SUFFIXES)}.")


def plot(path: Path, title: str, seconds: Sequence[SecondMetrics], e2e_ms: float | None) -> None:
    """Write the plot to a file. Raises `OutputError`."""
    group = max(1, math.ceil(len(seconds) / POINTS))
    minutes = np.arange(0, len(seconds), group) / 60

    def series(name: str, reduce: Callable[..., float] = np.nanmean) -> list[float]:
        values = np.array([_number(getattr(second, name)) for second in seconds])
        parts = (values[start : start + group] for start in range(0, len(values), group))
        return [reduce(part) if np.isfinite(part).any() else math.nan for part in parts]

    figure = Figure(figsize=(9, 11), layout="constrained")
    axes = figure.subplots(5, 1, sharex=True)
    load, threshold, replicas, latency, quality = axes
    load.plot(minutes, series("arrived"), label="arrived", linewidth=1)
    load.plot(minutes, series("ended"), label="ended", linewidth=1)
    load.plot(minutes, series("refused"), label="refused", linewidth=1, color="tab:red")
    load.set_ylabel("requests a second")
    threshold.plot(minutes, series("threshold"), color="tab:purple", linewidth=1)
    threshold.set_ylabel("threshold,\nmean over tokens")
    replicas.step(minutes, series("replicas"), where="post", label="running", linewidth=1)
    replicas.step(minutes, series("desired_replicas"), where="post", label="desired", linewidth=1, linestyle=":")
    replicas.set_ylabel("replicas")
    replicas.set_ylim(bottom=0)
    latency.plot(minutes, series("e2e_p95_ms", np.nanmax), label="E2E", linewidth=1)
    latency.plot(minutes, series("ttft_p95_ms", np.nanmax), label="TTFT", linewidth=1)
    if e2e_ms is not None:
        latency.axhline(e2e_ms, color="tab:red", linewidth=1, linestyle="--", label="SLO")
    latency.set_yscale("log")
    latency.set_ylabel("95th percentile, ms")
    quality.plot(minutes, series("agreement"), label="agreement with autoregressive decoding", linewidth=1)
    quality.plot(minutes, series("accuracy"), label="accuracy", linewidth=1)
    quality.set_ylabel("share of tokens")
    quality.set_xlabel("minutes")
    for axis in (load, replicas, latency, quality):
        axis.legend(loc="best", fontsize="small")
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[0].set_title(title)
    save_figure(figure, path)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure to a file. Raises `OutputError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}.") from error


def _number(value: float | None) -> float:
    return math.nan if value is None else value
