"""All figures of `reproduce.py` as Markdown: tables with spread, and whether the claims hold."""

from collections.abc import Iterable, Iterator, Sequence

from reproduce_claims import DIFFUSED, ONE, claims, verdict
from reproduce_figures import (
    ALLOWED,
    AT,
    METRICS,
    Json,
    accuracy,
    agreement,
    ahead,
    cached,
    cpu_s,
    drafts,
    free,
    over,
    rate,
    rows,
    times,
)
from reproduce_recipes import BASE

HEAD = """\
# The paper's claims and every baseline at one budget

`{command}`: {seeds} seeds, {questions:,} held-out questions for each figure. Behind ± stands the standard deviation
over seeds of training (order of the data, phases); the weights at the start and the questions are the same for all.
Tokens per forward are all tokens over all forwards. Measured on {cpu}, {cores} cores, torch {torch}, commit {commit}.
"""
MODELS = f"""\
## What is trained

At equal accuracy: the most tokens per forward of all thresholds whose accuracy is at most {ALLOWED:.0%} below that of
the AR model.
"""
DECODERS = """\
## Ways to decode

One prompt after the other, in turns; tokens/s of the best of three rounds. Speculative decoding drafts four tokens a
round, with a network of a twentieth of the parameters. `engine` is ours with `mars-8`, uncompiled as the others are.
"""
CACHES = """\
## Caches

Tokens/s of `mars-16` with one thread: medians of rounds in turns, then means over seeds.
"""
METRIC = """\
## Acceptance metrics

Of `mars-8`: the most tokens per forward at equal accuracy.
"""
CLAIMS = """\
## Claims

Each is written as a difference that should be positive, seed by seed: positive in all, it holds; negative in all, it
does not; otherwise nobody can tell at this size.
"""


def markdown(report: Json) -> str:
    """Write the report."""
    seeds, machine = list(report["seeds"].values()), report["machine"]
    head = HEAD.format(
        command=report["command"],
        seeds=len(seeds),
        questions=rows(seeds[0], "ar")[ONE]["examples"],
        cpu=machine["cpu"],
        cores=machine["cores"],
        torch=machine["torch"],
        commit=machine["commit"][:12],
    )
    columns = (
        "accuracy, one token at a time",
        f"accuracy at {AT}",
        f"tokens per forward at {AT}",
        f"agreement at {AT}",
    )
    return "\n".join(
        [
            head,
            MODELS,
            _table(("recipe", *columns, "tokens per forward at equal accuracy", "CPU seconds"), _models(report, seeds)),
            DECODERS,
            _table(
                ("decoder", "accuracy", "tokens per target forward", "draft forwards per token", "tokens/s", "x AR"),
                _decoders(seeds),
            ),
            CACHES,
            _table(("decoder", *(f"batch {batch}" for batch in rows(seeds[0], "caches"))), _caches(seeds)),
            METRIC,
            _table(("metric", "tokens per forward"), ((each, over(seeds, free("metrics", each))) for each in METRICS)),
            CLAIMS,
            _table(
                ("claim", "published", "difference here", "verdict"),
                (
                    (each.says, each.published, over(seeds, each.difference, "+.3f"), verdict(each, seeds))
                    for each in claims()
                ),
            ),
        ]
    )


def _models(report: Json, seeds: Sequence[Json]) -> Iterator[Sequence[str]]:
    base = {"name": BASE, "kind": "streams", "about": "AR SFT, what the others begin with"}
    for recipe in (base, *report["recipes"]):
        name, kind, trained = recipe["name"], recipe["kind"], recipe["name"] in seeds[0]["training"]
        if kind == "medusa":
            continue  # heads are no model; they are among the ways to decode
        looks = AT in rows(seeds[0], name)
        yield (
            f"`{name}`: {recipe['about']}",
            over(seeds, accuracy(name, DIFFUSED if kind == "diffusion" else ONE), ".1%"),
            over(seeds, accuracy(name, AT), ".1%") if looks else "",
            over(seeds, ahead(name)) if looks else "1",
            over(seeds, agreement(name), ".1%") if looks and kind == "streams" else "",
            over(seeds, free(name)) if looks else "",
            over(seeds, cpu_s(name), ",.0f") if trained else "",
        )


def _decoders(seeds: Sequence[Json]) -> Iterator[Sequence[str]]:
    for name in rows(seeds[0], "rivals"):
        yield (
            name,
            over(seeds, accuracy("rivals", name), ".1%"),
            over(seeds, ahead("rivals", name)),
            over(seeds, drafts(name)),
            over(seeds, rate(name), ",.0f"),
            over(seeds, times(rate(name), rate("AR"), 0.0)),
        )


def _caches(seeds: Sequence[Json]) -> Iterator[Sequence[str]]:
    batches = rows(seeds[0], "caches")
    for name in next(iter(batches.values())):
        yield (name, *(over(seeds, cached(name, batch), ",.0f") for batch in batches))


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    every = [head, ["---", *("---:" for _ in head[1:])], *lines]
    return "".join("| " + " | ".join(line) + " |\n" for line in every)
