"""Figures of one seed, each a function of its results; and their mean and spread over seeds.

A figure is None where nothing reaches what it asks for; whatever is made of it is None then too.
"""

from collections.abc import Callable, Sequence
from math import sqrt
from operator import truediv
from statistics import fmean, median, stdev

from pipelines.pipeline_files import Json
from pipelines.reproduction.recipes import BASE, BLOCKS, COST

Figure = Callable[[Json], float | None]
"""A figure, computed from the results of one seed."""
Rounds = Callable[[Json], list[float]]
"""Tokens per second, round by round; the rounds of all decoders were run in turns."""
Way = tuple[str, str]
"""A model, or another name under which something was measured, and a way to decode."""

ONE = "ar"
"""One token at a time, the way to decode; the recipe of this name is AR SFT."""
AT = "0.95"
ALLOWED = 0.01
"""Accuracy that may be lost where nothing should be."""
LESS = 0.02
"""Accuracy below the AR model at which speeds are compared: two points."""
FAR_LESS = 0.05
"""Accuracy below the AR model at which recipes of one pass are compared: five points.

One pass of training, even of AR SFT, already loses one to two points, so at two points mostly chance would be left.
"""
METRICS = ("probability", "entropy", "margin")


def over_seeds(seeds: Sequence[Json], figure: Figure, form: str = ".2f") -> str:
    """Return mean and standard deviation over the seeds that have one, and how many those are where not all do."""
    values = [value for value in map(figure, seeds) if value is not None]
    if not values:
        return "-"
    some = f" ({len(values)} of {len(seeds)} seeds)" if len(values) < len(seeds) else ""
    return f"{fmean(values):{form}}" + (f" ± {stdev(values):{form.lstrip('+')}}" if len(values) > 1 else "") + some


def rows(seed: Json, name: str) -> Json:
    """Return what was measured under a name: of a model, a row for each way to decode."""
    found: Json = seed["figures"][name]
    return found


def accuracy(way: Way) -> Figure:
    """Return the share of right answers."""
    return lambda seed: float(rows(seed, way[0])[way[1]]["accuracy"])


def tokens_per_forward(name: str, way: str = AT) -> Figure:
    """Return all tokens over all forwards."""
    return lambda seed: float(rows(seed, name)[way]["tokens_per_forward"])


def agreement(name: str) -> Figure:
    """Return the share of tokens at `AT` that autoregressive decoding would choose too."""
    return lambda seed: float(rows(seed, name)[AT]["agreement"])


def at_equal_accuracy(name: str, less: float, metric: str | None = None) -> Figure:
    """Return the tokens per forward at which accuracy is `less` below that of the AR model: the same for all.

    Between two thresholds that is on the line through them.

    Thresholds are gone through from the strictest on, to the first that costs too much: what lies behind it would be
    luck. Where none does it is the last; None where even one token at a time costs too much. `metric` is one of those
    that `mars-8` was decoded by.
    """

    def figure(seed: Json) -> float | None:
        least = rows(seed, BASE)[ONE]["accuracy"] - less
        path = list(rows(seed, name).values())
        if metric is not None:
            of_metric = [row for way, row in rows(seed, "metrics").items() if way.startswith(metric)]
            path = [rows(seed, name)[ONE], *of_metric]
        before = None
        for row in path:
            if row["accuracy"] < least:
                break
            before = row
        else:
            return float(path[-1]["tokens_per_forward"])
        if before is None:
            return None
        share = (before["accuracy"] - least) / (before["accuracy"] - row["accuracy"])
        more = row["tokens_per_forward"] - before["tokens_per_forward"]
        return float(before["tokens_per_forward"] + share * more)

    return figure


def cpu_s(name: str) -> Figure:
    """Return the CPU seconds of a training; None of one that was stopped and went on."""
    return lambda seed: seed["training"][name]["cpu_s"]


def step_cost(seed: Json) -> float | None:
    """Return what a step of MARS costs, in steps of AR SFT: `ar-longer` takes COST times as many as MARS."""
    of_mars = [cpu_s(f"mars-{block}")(seed) for block in BLOCKS]
    of_ar = cpu_s("ar-longer")(seed)
    known = [each for each in of_mars if each is not None]
    return median(known) / (of_ar / COST) if known and of_ar else None


def memory_mib(name: str) -> Figure:
    """Return the peak memory of a training, in MiB."""
    return lambda seed: rows(seed, "memory")[name]["bytes"] / 2**20


def alone(decoder: str) -> Rounds:
    """Return the rounds of a decoder that takes one prompt after the other."""

    def rounds(seed: Json) -> list[float]:
        row = rows(seed, "baselines")[decoder]
        return [row["tokens"] / seconds for seconds in row["seconds"]]

    return rounds


def in_batch(decoder: str, batch: str) -> Rounds:
    """Return the rounds of a decoder among the caches."""
    return lambda seed: [
        sample["tokens"] / sample["seconds"] for sample in rows(seed, "caches")[batch][decoder]["samples"]
    ]


def best_cache_block(seed: Json, batch: str) -> int:
    """Return the block of the paper's cache that decodes fastest."""
    blocks = [int(name.split()[-1]) for name in rows(seed, "caches")[batch] if name.startswith("block cache")]
    return max(blocks, key=lambda block: median(in_batch(f"block cache {block}", batch)(seed)))


def block_cache(batch: str) -> Rounds:
    """Return the rounds of the paper's decoder with its best block."""
    return lambda seed: in_batch(f"block cache {best_cache_block(seed, batch)}", batch)(seed)


def rate(rounds: Rounds) -> Figure:
    """Return the median of the rounds."""
    return lambda seed: median(rounds(seed))


def speedup(one: Rounds, other: Rounds) -> Figure:
    """Return the median over rounds of the quotient within a round."""
    return lambda seed: median(a / b for a, b in zip(one(seed), other(seed), strict=True))


def drafts(decoder: str) -> Figure:
    """Return the forwards of the draft for each token."""
    return lambda seed: float(
        rows(seed, "baselines")[decoder]["draft_forwards"] / rows(seed, "baselines")[decoder]["tokens"]
    )


def draft_cost(decoder: str, target: str) -> Figure:
    """Return what a forward of the draft takes by the clock, in forwards of the target alone."""

    def figure(seed: Json) -> float:
        both = rows(seed, "baselines")[decoder]
        one = rows(seed, "baselines")[target]
        forward_s = median(one["seconds"]) / one["tokens"] * one["tokens_per_forward"]
        of_target_s = both["tokens"] / both["tokens_per_forward"] * forward_s
        return float((median(both["seconds"]) - of_target_s) / both["draft_forwards"] / forward_s)

    return figure


def minus(one: Figure, other: Figure, bound: float = 0.0) -> Figure:
    """Return how far a difference lies above a bound."""
    return _of_both(one, other, lambda a, b: a - b - bound)


def above(figure: Figure, bound: float) -> Figure:
    """Return how far a figure lies above a bound."""
    return minus(figure, lambda _: bound)


def or_none_at_all(figure: Figure) -> Figure:
    """Return a figure, 0 where nothing reaches what it asks for."""
    return lambda seed: figure(seed) or 0.0


def quotient(one: Figure, other: Figure) -> Figure:
    """Return one figure over another."""
    return _of_both(one, other, truediv)


def _of_both(one: Figure, other: Figure, combine: Callable[[float, float], float]) -> Figure:
    def figure(seed: Json) -> float | None:
        a = one(seed)
        b = other(seed)
        return None if a is None or b is None else combine(a, b)

    return figure


def within(figure: Figure, low: float, high: float) -> Figure:
    """Return how far a figure lies within two bounds; below 0 outside of them."""

    def inside(seed: Json) -> float | None:
        value = figure(seed)
        return None if value is None else min(value - low, high - value)

    return inside


def question_error(seeds: Sequence[Json], one: Way, other: Way) -> float:
    """Return the standard error, over questions, of the difference of two accuracies.

    Questions are the same in all seeds, so their means over seeds are what there is.
    """

    def right(seed: Json, way: Way) -> list[int]:
        return [int(each) for each in rows(seed, way[0])[way[1]]["right"]]

    of_seeds = [[a - b for a, b in zip(right(seed, one), right(seed, other), strict=True)] for seed in seeds]
    mean_of_question = [fmean(of_question) for of_question in zip(*of_seeds, strict=True)]
    return stdev(mean_of_question) / sqrt(len(mean_of_question))
