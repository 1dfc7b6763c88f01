"""What arXiv 2604.07023 says, and what it does not try, each as a difference that should be positive.

Seeds are paired: a claim holds when its difference is positive in all of them, it does not hold when it is negative in
all of them, and nobody can tell otherwise, or from one seed. So the report asserts the order of things; no test does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from reproduce_figures import (
    ALLOWED,
    AT,
    METRICS,
    Figure,
    Json,
    accuracy,
    ahead,
    block_cache,
    cached,
    free,
    minus,
    rate,
    step_cost,
    times,
)
from reproduce_recipes import BLOCKS

ONE = "ar"
"""One token at a time, the way to decode; the recipe of this name is AR SFT."""
DIFFUSED = "one at a time"
SPECULATIVE = "speculative, AR + AR"
MARS_TARGET = "speculative, AR draft, MARS target"
MARS_BOTH = "speculative, MARS both"


@dataclass(frozen=True, slots=True)
class Claim:
    """One statement, what was published, and our difference."""

    says: str
    published: str
    difference: Figure


def verdict(claim: Claim, seeds: Sequence[Json]) -> str:
    """Say whether it holds."""
    found = [claim.difference(seed) for seed in seeds]
    if len(found) > 1 and min(found) > 0:
        return "holds"
    if len(found) > 1 and max(found) < 0:
        return "does not hold"
    return "cannot tell"


def claims() -> Iterator[Claim]:
    """Yield all, those of the paper first."""
    yield from _training()
    yield from _thresholds()
    yield from _decoding()
    yield from _beyond()


def _training() -> Iterator[Claim]:
    for block, published in zip(BLOCKS, ("30.4", "29.7", "29.7"), strict=True):
        yield Claim(
            f"MARS, one token at a time, B = {block}: no worse than AR SFT (one point allowed)",
            f"{published} against 28.7 (0.5B)",
            minus(accuracy(f"mars-{block}", ONE), accuracy("ar", ONE), -ALLOWED),
        )
    yield Claim(
        "As much compute in more AR SFT helps less than MARS, B = 8",
        "26.4 against 29.7 (0.5B)",
        minus(accuracy("mars-8", ONE), accuracy("ar-longer", ONE)),
    )
    yield Claim(
        "A step of MARS costs 1.5 to 2.5 steps of AR SFT", "2.0 to 2.2", lambda seed: 0.5 - abs(step_cost(seed) - 2)
    )
    for small, large in pairwise(BLOCKS):
        yield Claim(
            f"Without the AR loss accuracy falls from B = {small} to {large}",
            {4: "28.4 to 26.4", 8: "26.4 to 22.2"}[small],
            minus(accuracy(f"mask-only-{small}", ONE), accuracy(f"mask-only-{large}", ONE)),
        )
    for block, published in zip(BLOCKS, ("30.4 against 28.4", "29.7 against 26.4", "29.7 against 22.2"), strict=True):
        yield Claim(
            f"The AR loss raises accuracy, B = {block}",
            published,
            minus(accuracy(f"mars-{block}", ONE), accuracy(f"mask-only-{block}", ONE)),
        )
    yield Claim(
        "With it, B = 16 loses less than one point to B = 4",
        "29.7 against 30.4",
        minus(accuracy("mars-16", ONE), accuracy("mars-4", ONE), -ALLOWED),
    )
    yield Claim(
        "Block diffusion, B = 4, is worse than AR SFT",
        "22.8 against 28.7",
        minus(accuracy("ar", ONE), accuracy("diffusion-4", DIFFUSED)),
    )
    yield Claim(
        "Block diffusion, B = 4, is worse than MARS, B = 4",
        "22.8 against 30.4",
        minus(accuracy("mars-4", ONE), accuracy("diffusion-4", DIFFUSED)),
    )


def _thresholds() -> Iterator[Claim]:
    for block, tokens, lost in zip(BLOCKS, ("1.46", "1.49", "1.47"), ("1.4", "1.1", "1.6"), strict=True):
        yield Claim(
            f"Threshold {AT}, B = {block}: more than 1.4 tokens per forward",
            f"{tokens} (0.5B)",
            minus(ahead(f"mars-{block}"), 1.4),
        )
        yield Claim(
            f"Threshold {AT}, B = {block}: less than two points of accuracy lost",
            f"{lost} (0.5B)",
            minus(accuracy(f"mars-{block}", AT), accuracy(f"mars-{block}", ONE), -0.02),
        )
    yield Claim(
        f"Threshold {AT}: B = 16 gives more tokens per forward than B = 4",
        "1.87 against 1.68 (7B)",
        minus(ahead("mars-16"), ahead("mars-4")),
    )
    yield Claim(
        "Threshold 0.6 gives more tokens per forward than 0.95, B = 4",
        "2.55 against 1.79 (7B)",
        minus(ahead("mars-4", "0.6"), ahead("mars-4")),
    )
    yield Claim(
        "and costs accuracy",
        "60.3 against 71.0 (7B)",
        minus(accuracy("mars-4", AT), accuracy("mars-4", "0.6")),
    )

    def apart(seed: Json) -> float:
        reached = [free("metrics", metric)(seed) for metric in METRICS]
        return max(reached) / max(min(reached), 1e-9) - 1

    yield Claim(
        "The three metrics reach alike at equal accuracy (within a tenth)", "similar", lambda seed: 0.1 - apart(seed)
    )


def _decoding() -> Iterator[Claim]:
    yield Claim(
        "Jacobi decoding on the AR model: less than 1.2 tokens per forward",
        "1.07",
        lambda seed: 1.2 - ahead("rivals", "Jacobi")(seed),
    )
    for batch, published in (("4", "1.71"), ("16", "1.34")):
        yield Claim(
            f"The block cache is faster than AR with a cache, batch {batch}",
            f"{published} x (7B)",
            times(block_cache(batch), cached("generate", batch)),
        )
    yield Claim(
        "and gains less at batch 16 than at 4, where rows wait for more others",
        "1.34 x against 1.71 x",
        minus(
            times(block_cache("4"), cached("generate", "4")),
            times(block_cache("16"), cached("generate", "16")),
        ),
    )
    yield Claim(
        "Without a cache it is slower than AR with one, batch 16",
        "0.23 x",
        times(cached("generate", "16"), cached("no cache", "16")),
    )
    yield Claim(
        "A MARS target raises the tokens per target forward of speculative decoding",
        "4.14 against 3.56",
        minus(ahead("rivals", MARS_TARGET), ahead("rivals", SPECULATIVE)),
    )
    yield Claim(
        "and a MARS draft the tokens per second", "1.40 x against 1.27 x", times(rate(MARS_BOTH), rate(MARS_TARGET))
    )


def _beyond() -> Iterator[Claim]:
    yield Claim(
        "Ours: exact mode, one prompt at a time, is faster than AR in the same engine",
        "not tried",
        times(rate("engine, exact"), rate("engine, AR")),
    )
    for batch in ("4", "16"):
        yield Claim(
            f"Ours: a cursor for each sequence is faster than the best block cache, batch {batch}",
            "future work",
            times(cached(f"threshold {AT}", batch), block_cache(batch)),
        )
    for recipe, paper, about in (
        ("random-8", "mars-8", "random block phase, B = 8"),
        ("share-8", "mars-8", "half of the masks"),
        ("guesses-8", "mars-8", "own guesses left visible"),
        ("decay-8", "mars-8", "loss weights by offset"),
        ("distill-8", "mars-8", "the clean stream teaches"),
        ("own-8", "mars-8", "self-distilled targets"),
        ("random-16", "mars-16", "random block phase, B = 16"),
    ):
        yield Claim(
            f"Ours: {about}: more tokens per forward at equal accuracy than `{paper}`",
            "not tried",
            minus(free(recipe), free(paper)),
        )

    def best_of_paper(seed: Json) -> float:
        return max(free(f"mars-{block}")(seed) for block in BLOCKS)

    yield Claim(
        "Ours: `best` gives 1.3 times the tokens per forward of the paper's recipe with its best B, at equal accuracy",
        "not tried",
        times(free("best"), best_of_paper, 1.3),
    )
