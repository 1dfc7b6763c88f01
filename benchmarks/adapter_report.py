"""Write the report of `benchmarks/adapter.py` as Markdown, and fit tokens per forward over training tokens."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

Json = dict[str, Any]

FURTHER = (1, 10, 100)
"""Factors of training tokens to extrapolate to."""
HEAD = ("", "tokens per forward", "tokens/s", "times `ar`", "agreement", "same answers", "right", "p")


def fit(points: Sequence[Json]) -> Json | None:
    """Fit a line of tokens per forward over the binary logarithm of training tokens; None for fewer than three points.

    `gain` is the gain of a doubling, with its standard error. `expected` extrapolates to more training.
    """
    if len(points) < 3:
        return None
    doublings = np.log2([point["tokens"] for point in points])
    values = np.array([point["value"] for point in points])
    gain, start = np.polyfit(doublings, values, 1)
    variance, _ = np.diag(_covariance(doublings, values))
    expected = {str(times): float(start + gain * (doublings[-1] + np.log2(times))) for times in FURTHER}
    return {"gain": float(gain), "gain_error": float(np.sqrt(variance)), "start": float(start), "expected": expected}


def _covariance(x: Any, y: Any) -> Any:
    """Return the covariance of slope and intercept from the residuals."""
    design = np.stack([x, np.ones_like(x)], axis=1)
    left = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
    return np.linalg.inv(design.T @ design) * (left @ left) / (len(x) - 2)


def markdown(report: Json) -> str:
    """Return a table for each workload and one for the curve."""
    machine = report["machine"]
    parts = [
        "# Adapters",
        f"{machine['cpu']}, {report['threads']} threads, {report['dtype']}, commit {machine['commit']}; "
        "made by `benchmarks/adapter.py`.",
    ]
    for name, workload in report["workloads"].items():
        parts += [f"## {name}", _about(workload), "\n".join(_rows(workload))]
        if callers := workload.get("callers"):
            parts += [
                "Several requests at once, including prefill, `ar` and exact in turns:",
                "\n".join(_callers(callers)),
            ]
    if curve := report.get("curve"):
        parts += ["## More training", "\n".join(_curve(curve))]
    return "\n\n".join(parts) + "\n"


def _about(workload: Json) -> str:
    adapter = workload["adapter"]
    quality = workload.get("quality")
    speed = workload.get("speed")
    sentences = [f"{workload['model']}, adapter after {adapter['steps']} steps, {adapter['tokens']:,} tokens."]
    if speed:
        sentences.append(
            f"Speed: {speed['prompts']} prompts, one at a time, {speed['max_tokens']} tokens each, medians of rounds "
            "in turns, without prefill."
        )
        sentences += [f"{name}: {reason}." for name, reason in speed["absent"].items()]
    if quality:
        sentences.append(
            f"Quality: {quality['prompts']} prompts, {quality['max_tokens']} tokens at most; 95 % intervals (Wilson), "
            "p of McNemar's test against `ar`. Agreement is judged through torch; that of `ar` shows its rounding."
        )
    return " ".join(sentences)


def _rows(workload: Json) -> Iterator[str]:
    yield from _head(HEAD)
    quality = workload.get("quality", {}).get("settings", {})
    speed = workload.get("speed", {}).get("settings", {})
    for name in speed | quality:
        yield _line([name, *_speed_cells(speed.get(name)), *_quality_cells(quality.get(name), workload)])


def _callers(callers: Sequence[Json]) -> Iterator[str]:
    yield from _head(("callers", "tokens per forward", "`ar`, tokens/s", "exact, tokens/s", "times `ar`"))
    for figures in callers:
        rates = (f"{figures[name]['median']:.0f}" for name in ("ar", "exact"))
        times = figures["times_ar"]
        spread = f"{times['median']:.2f} ({times['min']:.2f}-{times['max']:.2f})"
        yield _line([str(figures["callers"]), f"{figures['tokens_per_forward']:.2f}", *rates, spread])


def _speed_cells(speed: Json | None) -> list[str]:
    if speed is None:
        return [""] * 3
    rate = speed["tokens_per_s"]
    times = speed["times_ar"]
    return [
        f"{speed['tokens_per_forward']:.2f}",
        f"{rate['median']:.0f} ({rate['min']:.0f}-{rate['max']:.0f})",
        f"{times['median']:.2f} ({times['min']:.2f}-{times['max']:.2f})",
    ]


def _quality_cells(quality: Json | None, workload: Json) -> list[str]:
    if quality is None:
        return [""] * 4
    prompts = workload["quality"]["prompts"]
    verdict = ["", ""]
    if "right" in quality:
        low, high = quality["interval"]
        share = quality["right"] / prompts
        verdict = [f"{share:.1%} ({low:.1%}-{high:.1%})", f"{quality['p_value']:.2g}"]
    return [f"{quality['agreement']:.2%}", f"{quality['same_answers'] / prompts:.0%}", *verdict]


def _curve(curve: Json) -> Iterator[str]:
    yield f"Exact mode on {curve['prompts']} general prompts, one at a time.\n"
    yield from _head(("steps", "tokens trained", "tokens per forward"))
    for point in curve["points"]:
        yield _line([str(point["steps"]), f"{point['tokens']:,}", f"{point['value']:.3f}"])
    if line := curve["fit"]:
        more = ", ".join(f"{value:.2f} at {times} times" for times, value in line["expected"].items())
        yield f"\nA doubling brings {line['gain']:.3f} ± {line['gain_error']:.3f}. Extrapolated: {more} the training."


def _head(names: Sequence[str]) -> list[str]:
    return [_line(names), _line(["---", *["---:"] * (len(names) - 1)])]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
