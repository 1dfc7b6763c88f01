"""Figures of one seed of `reproduce.py`, each a function of its results; and their mean and spread over seeds."""

from collections.abc import Callable, Sequence
from statistics import fmean, median, stdev
from typing import Any

from reproduce_recipes import BLOCKS, COST

Json = dict[str, Any]
Figure = Callable[[Json], float]
"""Of the results of one seed."""

AT = "0.95"
ALLOWED = 0.01
"""Accuracy that counts as equal to that of the AR model: one point less."""
METRICS = ("probability", "entropy", "margin")


def over(seeds: Sequence[Json], figure: Figure, form: str = ".2f") -> str:
    """Return mean and standard deviation."""
    values = [figure(seed) for seed in seeds]
    return f"{fmean(values):{form}}" + (f" ± {stdev(values):{form}}" if len(values) > 1 else "")


def rows(seed: Json, name: str) -> Json:
    """Return what was measured under a name: of a model, a row for each way to decode."""
    found: Json = seed["figures"][name]
    return found


def accuracy(name: str, way: str) -> Figure:
    """Return the share of right answers."""
    return lambda seed: float(rows(seed, name)[way]["accuracy"])


def ahead(name: str, way: str = AT) -> Figure:
    """Return the tokens per forward."""
    return lambda seed: float(rows(seed, name)[way]["tokens_per_forward"])


def agreement(name: str) -> Figure:
    """Return the share of tokens at `AT` that autoregressive decoding would choose too."""
    return lambda seed: float(rows(seed, name)[AT]["agreement"])


def free(name: str, prefix: str = "") -> Figure:
    """Return the most tokens per forward at equal accuracy, of the ways whose names begin with `prefix`.

    0 where even one token at a time costs more than is allowed.
    """

    def figure(seed: Json) -> float:
        least = accuracy("ar", "ar")(seed) - ALLOWED
        equal = (row for way, row in rows(seed, name).items() if way.startswith(prefix) and row["accuracy"] >= least)
        return max((float(row["tokens_per_forward"]) for row in equal), default=0.0)

    return figure


def cpu_s(name: str) -> Figure:
    """Return the CPU seconds of a training."""
    return lambda seed: float(seed["training"][name]["cpu_s"])


def step_cost(seed: Json) -> float:
    """Return what a step of MARS costs, in steps of AR SFT: `ar-longer` takes COST times as many as MARS."""
    return median(cpu_s(f"mars-{block}")(seed) for block in BLOCKS) / (cpu_s("ar-longer")(seed) / COST)


def rate(rival: str) -> Figure:
    """Return the tokens per second of a decoder of `reproduce_measures.rivals`, in its best round."""
    return lambda seed: float(rows(seed, "rivals")[rival]["tokens"] / min(rows(seed, "rivals")[rival]["seconds"]))


def drafts(rival: str) -> Figure:
    """Return the forwards of the draft for each token."""
    return lambda seed: float(rows(seed, "rivals")[rival]["draft_forwards"] / rows(seed, "rivals")[rival]["tokens"])


def cached(decoder: str, batch: str) -> Figure:
    """Return the tokens per second of a decoder of `reproduce_measures.caches`."""
    return lambda seed: float(rows(seed, "caches")[batch][decoder]["median"])


def block_cache(batch: str) -> Figure:
    """Return the tokens per second of the paper's decoder with its best block."""
    return lambda seed: max(
        cached(decoder, batch)(seed) for decoder in rows(seed, "caches")[batch] if decoder.startswith("block cache")
    )


def minus(one: Figure, other: Figure | float, bound: float = 0.0) -> Figure:
    """Return how far a difference lies above a bound."""
    return lambda seed: one(seed) - (other if isinstance(other, float) else other(seed)) - bound


def times(one: Figure, other: Figure, bound: float = 1.0) -> Figure:
    """Return how far a quotient lies above a bound."""
    return lambda seed: one(seed) / max(other(seed), 1e-9) - bound
