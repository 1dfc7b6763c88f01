"""Plot a simulation over time, or a plan: price, largest load and accuracy of each way of decoding.

If several seconds share a point, latencies show the worst of these seconds, and all other figures their mean.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from mars_ray.errors import OutputError
from mars_ray.simulate.metrics import SecondMetrics
from mars_ray.simulate.plan import PlanRow

POINTS = 600


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
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    """Write a figure to a file. Raises `OutputError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}.") from error


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def plot_plan(path: Path, title: str, rows: Sequence[PlanRow]) -> None:
    """Write the plot to a file; a way of decoding that misses the SLO has no bars. Raises `OutputError`."""
    figure = Figure(figsize=(10, 1.5 + 0.4 * len(rows)), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    price, load, accuracy = figure.subplots(1, 3, sharey=True)
    names = [row.decoding if row.replicas is not None else f"{row.decoding} (misses)" for row in rows]
    places = range(len(rows))
    colours = ["tab:purple" if row.decoding == "capacity" else "tab:blue" for row in rows]
    prices = [row.dollars_per_million_tokens for row in rows]
    loads = [row.requests_per_s / row.replicas if row.requests_per_s and row.replicas else None for row in rows]
    for axis, values, text in ((price, prices, "{:.3f}"), (load, loads, "{:.1f}")):
        bars = axis.barh(places, [value or 0.0 for value in values], color=colours)
        axis.bar_label(bars, [text.format(value) if value else "" for value in values], padding=3, fontsize="small")
    for height, row in enumerate(rows):
        if row.accuracy is not None:
            # Points, because accuracies differ by a few percent, which bars from 0 would hide.
            accuracy.plot(row.accuracy, height, "o", color=colours[height])
            label = {"textcoords": "offset points", "xytext": (6, -3), "fontsize": "small"}
            accuracy.annotate(f"{row.accuracy:.1%}", (row.accuracy, height), **label)
    price.set_title("dollars per million tokens\nat the load of the trace", fontsize="small")
    load.set_title("requests/s per replica\nat the largest load", fontsize="small")
    accuracy.set_title("accuracy\nat the load of the trace", fontsize="small")
    price.set_yticks(places, names)
    price.invert_yaxis()
    for axis in (price, load, accuracy):
        axis.margins(x=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    _save(figure, path)
