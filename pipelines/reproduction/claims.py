"""Claims of arXiv 2604.07023 and our own claims, each as a difference that should be positive.

A claim holds if its difference is significantly above 0, given the spread over seeds (one-sided t-test, 5 %) and, for
accuracies, also the spread over questions, which are the same in all seeds. It does not hold if its difference is
significantly below 0. Otherwise, or with one seed, the verdict is "cannot tell". Only the report states these verdicts;
no test asserts them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import hypot, sqrt
from statistics import fmean, stdev
from typing import Literal, get_args

from scipy.stats import norm, t

from pipelines.pipeline_files import Json
from pipelines.reproduction.figures import (
    ALLOWED,
    AT,
    FAR_LESS,
    LESS,
    METRICS,
    ONE,
    Figure,
    Way,
    above,
    accuracy,
    alone,
    at_equal_accuracy,
    best_cache_block,
    block_cache,
    in_batch,
    memory_mib,
    minus,
    question_error,
    quotient,
    speedup,
    step_cost,
    tokens_per_forward,
    within,
    zero_if_none,
)
from pipelines.reproduction.recipes import BASE, BLOCKS

SURE = 0.95
Verdict = Literal["holds", "does not hold", "cannot tell"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
AR: Way = (BASE, ONE)
DIFFUSION: Way = ("diffusion-4", "one at a time")
SPECULATIVE = "speculative, AR + AR"
MARS_TARGET = "speculative, AR draft, MARS target"
MARS_BOTH = "speculative, MARS both"


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim, the figure in the paper, and our measured difference."""

    says: str
    published: str
    """The figure of the paper; empty for our own claims."""
    difference: Figure
    accuracies: tuple[Way, Way] | None = None
    """The two accuracies that `difference` compares, if it compares accuracies."""


def verdict(claim: Claim, seeds: Sequence[Json]) -> Verdict:
    """Return the verdict on a claim."""
    differences = [value for value in map(claim.difference, seeds) if value is not None]
    if len(differences) < len(seeds) or len(differences) < 2:
        return "cannot tell"
    by_seeds = t.ppf(SURE, len(differences) - 1) * stdev(differences) / sqrt(len(differences))
    by_questions = norm.ppf(SURE) * question_error(seeds, *claim.accuracies) if claim.accuracies else 0.0
    chance = hypot(by_seeds, by_questions)
    if fmean(differences) > chance:
        return "holds"
    return "does not hold" if fmean(differences) < -chance else "cannot tell"


def claims() -> Iterator[Claim]:
    """Yield the claims of the paper."""
    yield from _training()
    yield from _thresholds()
    yield from _decoding()


def _accuracy(says: str, published: str, better: Way, worse: Way, bound: float = 0.0) -> Claim:
    return Claim(says, published, minus(accuracy(better), accuracy(worse), bound), (better, worse))


def _mars(block: int) -> Way:
    return f"mars-{block}", ONE


def _mask_only(block: int) -> Way:
    return f"mask-only-{block}", ONE


def _training() -> Iterator[Claim]:
    for block, published in zip(BLOCKS, ("30.4", "29.7", "29.7"), strict=True):
        published = f"{published} against 28.7 (0.5B)"
        yield _accuracy(f"MARS, one token at a time, B = {block}: better than AR SFT", published, _mars(block), AR)
        yield _accuracy("no worse, one point allowed", published, _mars(block), AR, -ALLOWED)
    longer = ("mars-8-long", ONE)
    yield _accuracy("MARS, B = 8, for 4.6 passes: better than AR SFT", "29.7 against 28.7 (0.5B)", longer, AR)
    yield _accuracy("AR SFT with MARS's compute is worse than AR SFT", "26.4 against 28.7", AR, ("ar-longer", ONE))
    yield _accuracy("and worse than MARS, B = 8", "26.4 against 29.7", _mars(8), ("ar-longer", ONE))
    yield Claim("A step of MARS costs 1.5 to 2.5 steps of AR SFT", "2.0 to 2.2", within(step_cost, 1.5, 2.5))
    memory = quotient(memory_mib("mars-8"), memory_mib("ar-longer"))
    yield Claim("and takes 1.25 to 1.75 times the memory", "about 1.5", within(memory, 1.25, 1.75))
    for small, large in pairwise(BLOCKS):
        yield _accuracy(
            f"Without the AR loss accuracy falls from B = {small} to {large}",
            {4: "28.4 to 26.4", 8: "26.4 to 22.2"}[small],
            _mask_only(small),
            _mask_only(large),
        )
    for block, published in zip(BLOCKS, ("30.4 against 28.4", "29.7 against 26.4", "29.7 against 22.2"), strict=True):
        yield _accuracy(f"The AR loss raises accuracy, B = {block}", published, _mars(block), _mask_only(block))
    yield _accuracy(
        "With it, B = 16 loses less than one point to B = 4", "29.7 against 30.4", _mars(16), _mars(4), -ALLOWED
    )
    yield _accuracy("Block diffusion, B = 4, is worse than AR SFT", "22.8 against 28.7", AR, DIFFUSION)
    yield _accuracy("Block diffusion, B = 4, is worse than MARS, B = 4", "22.8 against 30.4", _mars(4), DIFFUSION)


def _thresholds() -> Iterator[Claim]:
    for block, tokens, lost in zip(BLOCKS, ("1.46", "1.49", "1.47"), ("1.4", "1.1", "1.6"), strict=True):
        name = f"mars-{block}"
        yield Claim(
            f"Threshold {AT}, B = {block}: more than 1.4 tokens per forward",
            f"{tokens} (0.5B)",
            above(tokens_per_forward(name), 1.4),
        )
        yield _accuracy(
            f"Threshold {AT}, B = {block}: less than two points of accuracy lost",
            f"{lost} (0.5B)",
            (name, AT),
            (name, ONE),
            -0.02,
        )
    yield Claim(
        f"Threshold {AT}: B = 16 gives more tokens per forward than B = 4",
        "1.47 against 1.46 (0.5B), 1.87 against 1.68 (7B)",
        minus(tokens_per_forward("mars-16"), tokens_per_forward("mars-4")),
    )
    yield Claim(
        "Threshold 0.6 gives more tokens per forward than 0.95, B = 4",
        "2.55 against 1.79 (7B)",
        minus(tokens_per_forward("mars-4", "0.6"), tokens_per_forward("mars-4")),
    )
    yield _accuracy("and costs accuracy", "60.3 against 71.0 (7B)", ("mars-4", AT), ("mars-4", "0.6"))

    def alike(seed: Json) -> float | None:
        reached = [at_equal_accuracy("mars-8", FAR_LESS, metric)(seed) for metric in METRICS]
        speeds = [speed for speed in reached if speed is not None]
        return 1.1 - max(speeds) / min(speeds) if len(speeds) == len(METRICS) else None

    yield Claim("The three metrics reach the same tokens per forward at -5 points, within a tenth", "similar", alike)


def _decoding() -> Iterator[Claim]:
    yield Claim(
        "Jacobi decoding on the AR model: less than 1.2 tokens per forward",
        "1.07",
        minus(lambda _: 1.2, tokens_per_forward("baselines", "Jacobi")),
    )
    for batch, published in (("4", "1.71"), ("16", "1.34")):
        yield Claim(
            f"The block cache is faster than AR with a cache (`generate`), batch {batch}",
            f"{published} x (7B)",
            above(speedup(block_cache(batch), in_batch("generate", batch)), 1),
        )
    yield Claim(
        "and gains less at batch 16 than at 4, because rows wait for more other rows",
        "1.34 x against 1.71 x",
        minus(
            speedup(block_cache("4"), in_batch("generate", "4")),
            speedup(block_cache("16"), in_batch("generate", "16")),
        ),
    )
    yield Claim(
        "and its best block is smaller there",
        "16 against 32",
        lambda seed: best_cache_block(seed, "4") - best_cache_block(seed, "16"),
    )
    for batch, published in (("4", "0.90"), ("16", "0.23")):
        yield Claim(
            f"Without a cache it is slower than AR with one, batch {batch}",
            f"{published} x",
            above(speedup(in_batch("generate", batch), in_batch("no cache", batch)), 1),
        )
    yield Claim(
        "A MARS target raises the tokens per target forward of speculative decoding",
        "4.14 against 3.56",
        minus(tokens_per_forward("baselines", MARS_TARGET), tokens_per_forward("baselines", SPECULATIVE)),
    )
    yield Claim(
        "a MARS draft does not",
        "4.07 against 4.14",
        minus(tokens_per_forward("baselines", MARS_TARGET), tokens_per_forward("baselines", MARS_BOTH)),
    )
    yield Claim(
        "A MARS target makes speculative decoding faster",
        "1.27 x",
        above(speedup(alone(MARS_TARGET), alone(SPECULATIVE)), 1),
    )
    yield Claim("MARS both more so", "1.40 x", above(speedup(alone(MARS_BOTH), alone(MARS_TARGET)), 1))


def ours() -> Iterator[Claim]:
    """Yield our own claims."""
    yield Claim(
        "Exact mode, one prompt at a time, is faster than AR in the same engine",
        "",
        above(speedup(alone("engine, exact"), alone("engine, AR")), 1),
    )
    for batch in ("1", "4", "16"):
        yield Claim(
            f"Threshold {AT} is faster than AR in the same engine, batch {batch}",
            "",
            above(speedup(in_batch(f"threshold {AT}", batch), in_batch("ar", batch)), 1),
        )
    for batch in ("4", "16"):
        yield Claim(
            f"The engine is faster than the best block cache, batch {batch}",
            "",
            above(speedup(in_batch(f"threshold {AT}", batch), block_cache(batch)), 1),
        )
    for recipe, baseline, about in (
        ("random-8", "mars-8", "random block phase, B = 8"),
        ("decay-8", "mars-8", "loss weights by offset"),
        ("distill-8", "mars-8", "the clean stream as teacher"),
        ("own-8", "mars-8", "self-distilled targets"),
        ("random-16", "mars-16", "random block phase, B = 16"),
        ("distill-16", "random-16", "the clean stream as teacher, B = 16"),
        ("growth-16", "random-16", "blocks that grow to 16"),
    ):
        yield Claim(
            f"`{recipe}` ({about}): more tokens per forward at -5 points than `{baseline}`",
            "",
            minus(zero_if_none(at_equal_accuracy(recipe, FAR_LESS)), at_equal_accuracy(baseline, FAR_LESS)),
        )

    def gain(seed: Json) -> float | None:
        best, paper = (at_equal_accuracy(name, LESS)(seed) for name in ("best", "mars-8-long"))
        # 4 is the maximum with B = 4, however long the training takes.
        return None if best is None else best / max(4.0, paper or 0.0)

    yield Claim(
        "`best` gives 1.3 times the tokens per forward of `mars-8-long` at -2 points",
        "",
        above(gain, 1.3),
    )
