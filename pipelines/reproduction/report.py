"""Write all figures of the reproduction as Markdown: tables with spread, and verdicts on the claims."""

from collections.abc import Iterable, Iterator, Sequence

from pipelines.pipeline_files import Json
from pipelines.reproduction.claims import DIFFUSION, SPECULATIVE, VERDICTS, claims, ours, verdict
from pipelines.reproduction.figures import (
    AT,
    FAR_LESS,
    LESS,
    METRICS,
    ONE,
    accuracy,
    agreement,
    alone,
    at_equal_accuracy,
    cpu_s,
    draft_cost,
    drafts,
    in_batch,
    memory_mib,
    over_seeds,
    rate,
    rows,
    speedup,
    tokens_per_forward,
)
from pipelines.reproduction.recipes import BASE

HEAD = """\
# The paper's claims and every baseline at one budget

`{command}`: {seeds} seeds. Behind ± stands the standard deviation over seeds of training (order of the data, phases);
the weights at the start and the questions are the same for all. Tokens per forward are all tokens over all forwards.
Measured on {cpu}, {cores} cores, torch {torch}; written at commit {commit}, what earlier ones had measured is kept.
"""
MODELS = """\
## What is trained

{questions} held-out questions, each family alike. At -2 points: the tokens per forward at which accuracy is two points
below that of the AR model, the same bar for all, on the line between two thresholds; none where one token at a time is
below that already. One pass of training costs one to two points by itself, so what recipes of one pass have left there
is chance; they are compared at -5 points (a bar that was set when two seeds were known). CPU seconds are of trainings
that ran side by side, one on each core. Of the base's own answers {own:.1%} are the references; making them took
{own_s:,.0f} s of a core, once for all seeds. Peak memory of a process that trains, above that of one that has only
begun: AR SFT {ar_mib} MiB, MARS, B = 8, {mars_mib} MiB.
"""
DECODERS = """\
## Ways to decode

{questions} of the questions, one prompt after the other, {rounds} rounds in turns: medians, and of x AR the quotient
within a round. Speculative decoding drafts four tokens a round, with a network of a twentieth of the parameters, a
forward of which takes {draft} of one of the target: at this size both are overhead. `engine` is ours with `mars-8`,
uncompiled as the others are, with a block of 8.
"""
CACHES = """\
## Caches

Tokens/s of `mars-16` with one thread, {rounds} rounds in turns: medians, then means over seeds. `ar`, `exact` and
`threshold` are our engine, a cursor for each sequence, compiled but where it says eager, looking ahead as far as it
finds worth while; `generate` and `generate_batch` are those of transformers, one token at a time; `block cache` and
`no cache` the decoders of the paper at 0.95. Rows that have finished idle in the block cache; without one they leave.
"""
METRIC = """\
## Acceptance metrics

Of `mars-8`: the tokens per forward at -5 points.
"""
CLAIMS = """\
## Claims of the paper

Each is written as a difference that should be positive. It holds where the difference is larger than chance explains
(one-sided, 5 %: the spread over seeds, and of accuracies that over the questions), and does not where that is so the
other way round. Of claims without any difference one in twenty comes out as holding, and one in twenty as not.
Of these {count}: {found}.
"""
OURS = """\
## Beyond the paper

Differences and verdicts as above, and the difference in each seed. A recipe that is below the bar with
one token at a time already has no tokens per forward there, 0.
"""


def markdown(report: Json) -> str:
    """Write the report."""
    seeds = list(report["seeds"].values())
    return "\n".join(
        [
            _head(report),
            *_models_section(report, seeds),
            *_decoders_section(seeds),
            METRIC,
            _table(
                ("metric", "tokens per forward"),
                ((each, over_seeds(seeds, at_equal_accuracy("mars-8", FAR_LESS, each))) for each in METRICS),
            ),
            *_claims_section(seeds),
        ]
    )


def _head(report: Json) -> str:
    machine = report["machine"]
    return HEAD.format(
        command=report["command"],
        seeds=len(report["seeds"]),
        cpu=machine["cpu"],
        cores=machine["cores"],
        torch=machine["torch"],
        commit=(machine["commit"] or "unknown")[:12],
    )


def _models_section(report: Json, seeds: Sequence[Json]) -> Iterator[str]:
    yield MODELS.format(
        questions=rows(seeds[0], BASE)[ONE]["examples"],
        own=report["own_answers"]["like_references"],
        own_s=report["own_answers"]["cpu_s"],
        ar_mib=over_seeds(seeds, memory_mib("ar-longer"), ",.0f"),
        mars_mib=over_seeds(seeds, memory_mib("mars-8"), ",.0f"),
    )
    columns = (
        "accuracy, one token at a time",
        f"accuracy at {AT}",
        f"tokens per forward at {AT}",
        f"agreement at {AT}",
    )
    yield _table(("recipe", *columns, "at -2 points", "at -5 points", "CPU seconds"), _models(report, seeds))


def _decoders_section(seeds: Sequence[Json]) -> Iterator[str]:
    baselines = rows(seeds[0], "baselines")
    rounds = len(baselines["AR"]["seconds"])
    yield DECODERS.format(
        questions=baselines["AR"]["examples"],
        rounds=rounds,
        draft=over_seeds(seeds, draft_cost(SPECULATIVE, "AR")),
    )
    yield _table(
        ("decoder", "accuracy", "tokens per target forward", "draft forwards per token", "tokens/s", "x AR"),
        _decoders(seeds),
    )
    yield CACHES.format(rounds=rounds)
    yield _table(("decoder", *(f"batch {batch}" for batch in rows(seeds[0], "caches"))), _caches(seeds))


def _claims_section(seeds: Sequence[Json]) -> Iterator[str]:
    of_paper = list(claims())
    found = [verdict(each, seeds) for each in of_paper]
    yield CLAIMS.format(count=len(found), found=", ".join(f"{found.count(v)} {v}" for v in VERDICTS))
    yield _table(
        ("claim", "published", "difference here", "verdict"),
        (
            (each.says, each.published, over_seeds(seeds, each.difference, "+.3f"), said)
            for each, said in zip(of_paper, found, strict=True)
        ),
    )
    yield OURS
    yield _table(
        ("claim", "difference", "in each seed", "verdict"),
        (
            (
                each.says,
                over_seeds(seeds, each.difference, "+.3f"),
                ", ".join(over_seeds([seed], each.difference, "+.2f") for seed in seeds),
                verdict(each, seeds),
            )
            for each in ours()
        ),
    )


def _models(report: Json, seeds: Sequence[Json]) -> Iterator[Sequence[str]]:
    base = {"name": BASE, "kind": "streams", "about": "AR SFT, what the others begin with"}
    for recipe in (base, *report["recipes"]):
        name = recipe["name"]
        kind = recipe["kind"]
        measured = kind != "medusa"  # heads are no model; how they decode stands among the decoders
        looks = measured and AT in rows(seeds[0], name)
        one = DIFFUSION if kind == "diffusion" else (name, ONE)
        yield (
            f"`{name}`: {recipe['about']}",
            over_seeds(seeds, accuracy(one), ".1%") if measured else "",
            over_seeds(seeds, accuracy((name, AT)), ".1%") if looks else "",
            over_seeds(seeds, tokens_per_forward(name)) if looks else "",
            over_seeds(seeds, agreement(name), ".1%") if looks and kind == "streams" else "",
            *(over_seeds(seeds, at_equal_accuracy(name, less)) if looks else "" for less in (LESS, FAR_LESS)),
            over_seeds(seeds, cpu_s(name), ",.0f") if name in seeds[0]["training"] else "",
        )


def _decoders(seeds: Sequence[Json]) -> Iterator[Sequence[str]]:
    for name in rows(seeds[0], "baselines"):
        yield (
            name,
            over_seeds(seeds, accuracy(("baselines", name)), ".1%"),
            over_seeds(seeds, tokens_per_forward("baselines", name)),
            over_seeds(seeds, drafts(name)),
            over_seeds(seeds, rate(alone(name)), ",.0f"),
            over_seeds(seeds, speedup(alone(name), alone("AR"))),
        )


def _caches(seeds: Sequence[Json]) -> Iterator[Sequence[str]]:
    batches = rows(seeds[0], "caches")
    for name in next(iter(batches.values())):
        yield (name, *(over_seeds(seeds, rate(in_batch(name, batch)), ",.0f") for batch in batches))


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    every = [head, ["---", *("---:" for _ in head[1:])], *lines]
    return "".join("| " + " | ".join(line) + " |\n" for line in every)
