"""Write the report of the reproduction as Markdown: tables with spread, and verdicts on the claims."""

from collections.abc import Iterator, Sequence

from pipelines.pipeline_files import Json, markdown_table
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

`{command}`: {seeds} seeds. The number after ± is the standard deviation over training seeds (data order, phases); all
seeds share the questions and, except for the drafts, the initial weights. "Tokens per forward" is all tokens divided by
all forwards. Measured on {cpu}, {cores} cores, torch {torch}; written at commit {commit}, with measurements kept from
earlier commits.
"""
MODELS = """\
## Trained models

{questions} held-out questions, the same number for every family. "At -2 points" is the tokens per forward at which
accuracy is two points below the AR model's, interpolated between two thresholds; the limit is the same for all models.
There is no value if even one token at a time is below the limit. One pass of training itself loses one to two points,
so at -2 points, recipes of one pass mostly differ by chance; they are compared at -5 points (chosen after two seeds had
been measured). CPU seconds are those of trainings that ran in parallel, one per core. {own:.1%} of the base's own
answers equal the reference; generating them took {own_s:,.0f} CPU seconds, once for all seeds. Peak memory of a
training process above an idle process: AR SFT {ar_mib} MiB, MARS with B = 8 {mars_mib} MiB.
"""
DECODERS = """\
## Decoders

{questions} of the questions, one prompt at a time. Decoders alternated for {rounds} rounds; figures are medians, and
"x AR" is the median of the ratios within rounds. Speculative decoding drafts four tokens per round with a network of a
twentieth of the parameters. A forward of this network takes {draft} of the time of a target forward, because overhead
dominates both at this size. `engine` is ours with `mars-8` and a block of 8, eager like the other decoders.
"""
CACHES = """\
## Caches

Tokens/s of `mars-16` with one thread, as medians over {rounds} alternating rounds, averaged over seeds. `ar`, `exact`
and `threshold` are our engine, in which each sequence advances by itself and which chooses its
own block size. `generate` and `generate_batch` are transformers, one token at a time; `block cache` and `no
cache` are the decoders of the paper at threshold 0.95. Finished rows stay in the block cache and idle; without a cache
they leave the batch.
"""
METRIC = """\
## Acceptance metrics

Tokens per forward of `mars-8` at -5 points.
"""
CLAIMS = """\
## Claims of the paper

Each claim is stated as a difference that should be positive. It holds if the difference is significantly above 0
(one-sided, 5 %, given the spread over seeds and, for accuracies, over questions), and does not hold if the difference
is significantly below 0. For claims without a true difference, one in twenty is expected to hold by chance, and one in
twenty not to hold. Verdicts on the {count} claims: {found}.
"""
OURS = """\
## Beyond the paper

Differences and verdicts as above, and the difference for each seed. A recipe whose accuracy with one token at a time
is already below the limit counts as 0 tokens per forward.
"""


def markdown(report: Json) -> str:
    """Return the report as Markdown."""
    seeds = list(report["seeds"].values())
    return "\n".join(
        [
            _head(report),
            *_models_section(report, seeds),
            *_decoders_section(seeds),
            METRIC,
            markdown_table(
                ("metric", "tokens per forward"),
                ((metric, over_seeds(seeds, at_equal_accuracy("mars-8", FAR_LESS, metric))) for metric in METRICS),
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
    yield markdown_table(("recipe", *columns, "at -2 points", "at -5 points", "CPU seconds"), _models(report, seeds))


def _decoders_section(seeds: Sequence[Json]) -> Iterator[str]:
    baselines = rows(seeds[0], "baselines")
    rounds = len(baselines["AR"]["seconds"])
    yield DECODERS.format(
        questions=baselines["AR"]["examples"],
        rounds=rounds,
        draft=over_seeds(seeds, draft_cost(SPECULATIVE, "AR")),
    )
    yield markdown_table(
        ("decoder", "accuracy", "tokens per target forward", "draft forwards per token", "tokens/s", "x AR"),
        _decoders(seeds),
    )
    yield CACHES.format(rounds=rounds)
    yield markdown_table(("decoder", *(f"batch {batch}" for batch in rows(seeds[0], "caches"))), _caches(seeds))


def _claims_section(seeds: Sequence[Json]) -> Iterator[str]:
    of_paper = list(claims())
    verdicts = [verdict(claim, seeds) for claim in of_paper]
    yield CLAIMS.format(count=len(verdicts), found=", ".join(f"{verdicts.count(v)} {v}" for v in VERDICTS))
    yield markdown_table(
        ("claim", "published", "difference here", "verdict"),
        (
            (claim.says, claim.published, over_seeds(seeds, claim.difference, "+.3f"), outcome)
            for claim, outcome in zip(of_paper, verdicts, strict=True)
        ),
    )
    yield OURS
    yield markdown_table(
        ("claim", "difference", "by seed", "verdict"),
        (
            (
                claim.says,
                over_seeds(seeds, claim.difference, "+.3f"),
                ", ".join(over_seeds([seed], claim.difference, "+.2f") for seed in seeds),
                verdict(claim, seeds),
            )
            for claim in ours()
        ),
    )


def _models(report: Json, seeds: Sequence[Json]) -> Iterator[Sequence[str]]:
    base = {"name": BASE, "kind": "streams", "about": "AR SFT, the start of the other recipes"}
    for recipe in (base, *report["recipes"]):
        name = recipe["name"]
        kind = recipe["kind"]
        measured = kind != "medusa"  # heads are measured only as a decoder
        looks = measured and AT in rows(seeds[0], name)
        way = DIFFUSION if kind == "diffusion" else (name, ONE)
        yield (
            f"`{name}`: {recipe['about']}",
            over_seeds(seeds, accuracy(way), ".1%") if measured else "",
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
