"""Plot a plan: price, largest load and accuracy of each way of decoding."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from mars_ray.simulate.plan import PlanRow
from mars_ray.simulate.plot import save_figure


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
    save_figure(figure, path)
