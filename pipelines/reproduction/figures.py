"""Figures, each a function of the results of one seed, and their mean and spread over seeds.

A figure is None if no setting reaches its condition; every figure computed from it is None, too.
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
"""Tokens per second of each round; the rounds of all decoders alternated."""
Way = tuple[str, str]
"""A model or another name of measurements, and a way to decode."""

ONE = "ar"
"""Decoding one token at a time. The recipe with the same name is AR SFT."""
AT = "0.95"
ALLOWED = 0.01
"""Tolerance for accuracies that should be equal."""
LESS = 0.02
"""Accuracy below the AR model at which speeds are compared: two points."""
FAR_LESS = 0.05
"""Accuracy below the AR model at which recipes of one pass are compared: five points.

One pass of training, even of AR SFT, already loses one to two points, so at two points mostly chance would be left.
"""
METRICS = ("probability", "entropy", "margin")


def over_seeds(seeds: Sequence[Json], figure: Figure, form: str = ".2f") -> str:
    """Return mean and standard deviation over the seeds that have the figure, and their number if some lack it."""
    values = [value for value in map(figure, seeds) if value is not None]
    if not values:
        return "-"
    count = f" ({len(values)} of {len(seeds)} seeds)" if len(values) < len(seeds) else ""
    return f"{fmean(values):{form}}" + (f" ± {stdev(values):{form.lstrip('+')}}" if len(values) > 1 else "") + count


def rows(seed: Json, name: str) -> Json:
    """Return the rows measured under a name; for a model, one row for each way to decode."""
    measured: Json = seed["figures"][name]
    return measured


def accuracy(way: Way) -> Figure:
    """Return the share of correct answers."""
    return lambda seed: float(rows(seed, way[0])[way[1]]["accuracy"])


def tokens_per_forward(name: str, way: str = AT) -> Figure:
    """Return the number of all tokens divided by the number of all forwards."""
    return lambda seed: float(rows(seed, name)[way]["tokens_per_forward"])


def agreement(name: str) -> Figure:
    """Return the share of tokens at `AT` that autoregressive decoding would also choose."""
    return lambda seed: float(rows(seed, name)[AT]["agreement"])


def at_equal_accuracy(name: str, less: float, metric: str | None = None) -> Figure:
    """Return the tokens per forward at which the accuracy is `less` below the accuracy of the AR model.

    Values between two thresholds are interpolated linearly. Thresholds are tried from the strictest to the first one
    that loses too much accuracy; later ones could only be above the limit by chance. If no threshold loses too much,
    the result is the figure of the last one; if even one token at a time does, it is None. `metric` selects one of the
    acceptance metrics with which `mars-8` was decoded.
    """

    def figure(seed: Json) -> float | None:
        limit = rows(seed, BASE)[ONE]["accuracy"] - less
        curve = list(rows(seed, name).values())
        if metric is not None:
            of_metric = [row for way, row in rows(seed, "metrics").items() if way.startswith(metric)]
            curve = [rows(seed, name)[ONE], *of_metric]
        before = None
        for row in curve:
            if row["accuracy"] < limit:
                break
            before = row
        else:
            return float(curve[-1]["tokens_per_forward"])
        if before is None:
            return None
        share = (before["accuracy"] - limit) / (before["accuracy"] - row["accuracy"])
        more = row["tokens_per_forward"] - before["tokens_per_forward"]
        return float(before["tokens_per_forward"] + share * more)

    return figure


def cpu_s(name: str) -> Figure:
    """Return the CPU seconds of a training, or None if it was interrupted and resumed."""
    return lambda seed: seed["training"][name]["cpu_s"]


def step_cost(seed: Json) -> float | None:
    """Return the cost of a step of MARS, in steps of AR SFT; `ar-longer` takes COST times as many steps as MARS."""
    of_mars = [cpu_s(f"mars-{block}")(seed) for block in BLOCKS]
    of_ar = cpu_s("ar-longer")(seed)
    measured = [seconds for seconds in of_mars if seconds is not None]
    return median(measured) / (of_ar / COST) if measured and of_ar else None


def memory_mib(name: str) -> Figure:
    """Return the peak memory of a training, in MiB."""
    return lambda seed: rows(seed, "memory")[name]["bytes"] / 2**20


def alone(decoder: str) -> Rounds:
    """Return the rounds of a decoder that decodes one prompt after the other."""

    def rounds(seed: Json) -> list[float]:
        row = rows(seed, "baselines")[decoder]
        return [row["tokens"] / seconds for seconds in row["seconds"]]

    return rounds


def in_batch(decoder: str, batch: str) -> Rounds:
    """Return the rounds of a decoder in the comparison of caches."""
    return lambda seed: [
        sample["tokens"] / sample["seconds"] for sample in rows(seed, "caches")[batch][decoder]["samples"]
    ]


def best_cache_block(seed: Json, batch: str) -> int:
    """Return the block size with which the paper's cache decodes fastest."""
    blocks = [int(name.split()[-1]) for name in rows(seed, "caches")[batch] if name.startswith("block cache")]
    return max(blocks, key=lambda block: median(in_batch(f"block cache {block}", batch)(seed)))


def block_cache(batch: str) -> Rounds:
    """Return the rounds of the paper's cache with its best block size."""
    return lambda seed: in_batch(f"block cache {best_cache_block(seed, batch)}", batch)(seed)


def rate(rounds: Rounds) -> Figure:
    """Return the median tokens per second of the rounds."""
    return lambda seed: median(rounds(seed))


def speedup(rounds: Rounds, reference: Rounds) -> Figure:
    """Return the median over rounds of the speed relative to the reference in the same round."""
    return lambda seed: median(a / b for a, b in zip(rounds(seed), reference(seed), strict=True))


def drafts(decoder: str) -> Figure:
    """Return the forwards of the draft network per token."""
    return lambda seed: float(
        rows(seed, "baselines")[decoder]["draft_forwards"] / rows(seed, "baselines")[decoder]["tokens"]
    )


def draft_cost(decoder: str, target: str) -> Figure:
    """Return the time of a forward of the draft, in units of a forward of the target alone."""

    def figure(seed: Json) -> float:
        pair = rows(seed, "baselines")[decoder]
        single = rows(seed, "baselines")[target]
        forward_s = median(single["seconds"]) / single["tokens"] * single["tokens_per_forward"]
        target_s = pair["tokens"] / pair["tokens_per_forward"] * forward_s
        return float((median(pair["seconds"]) - target_s) / pair["draft_forwards"] / forward_s)

    return figure


def minus(left: Figure, right: Figure, bound: float = 0.0) -> Figure:
    """Return the amount by which `left` - `right` exceeds a bound."""
    return _combined(left, right, lambda a, b: a - b - bound)


def above(figure: Figure, bound: float) -> Figure:
    """Return the amount by which a figure exceeds a bound."""
    return minus(figure, lambda _: bound)


def zero_if_none(figure: Figure) -> Figure:
    """Return a figure with 0 instead of None."""
    return lambda seed: figure(seed) or 0.0


def quotient(left: Figure, right: Figure) -> Figure:
    """Return `left` divided by `right`."""
    return _combined(left, right, truediv)


def _combined(left: Figure, right: Figure, combine: Callable[[float, float], float]) -> Figure:
    def figure(seed: Json) -> float | None:
        a = left(seed)
        b = right(seed)
        return None if a is None or b is None else combine(a, b)

    return figure


def within(figure: Figure, low: float, high: float) -> Figure:
    """Return the distance of a figure from the nearer of two bounds; negative if the figure is outside of them."""

    def inside(seed: Json) -> float | None:
        value = figure(seed)
        return None if value is None else min(value - low, high - value)

    return inside


def question_error(seeds: Sequence[Json], left: Way, right: Way) -> float:
    """Return the standard error, over questions, of the difference between two accuracies.

    All seeds have the same questions, so each question counts once, with its mean over seeds.
    """

    def verdicts(seed: Json, way: Way) -> list[int]:
        return [int(digit) for digit in rows(seed, way[0])[way[1]]["right"]]

    differences = [[a - b for a, b in zip(verdicts(seed, left), verdicts(seed, right), strict=True)] for seed in seeds]
    means = [fmean(of_question) for of_question in zip(*differences, strict=True)]
    return stdev(means) / sqrt(len(means))
