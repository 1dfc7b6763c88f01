"""Render the report of an evaluation as one self-contained HTML file.

Prompts, answers and names are escaped, and the page's Content-Security-Policy forbids requests and all scripts but its
own.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from mars_ray.evaluation.report.charts import charts_of
from mars_ray.evaluation.results import Metrics, Results
from mars_ray.evaluation.scoring.disagreements import Disagreement, ShownAnswer, ShownToken
from mars_ray.evaluation.settings import AR
from mars_ray.web.report import render

COLOURS = 4
"""Number of background colours, which alternate so that neighbouring forwards differ."""


def evaluate_page(results: Results, examples: Mapping[str, Sequence[Disagreement]]) -> str:
    """Return the report as HTML."""
    return render(
        "evaluation/report/page.html",
        results=results,
        ar=AR.name,
        most=max(metrics.tokens_per_forward or 0.0 for metrics in results.overall.values()),
        drawn=charts_of(results),
        examples=examples,
        chunks=_chunks,
        shown=_shown,
        share=_share,
        number=_number,
        change=_change,
    )


def _chunks(answer: ShownAnswer) -> Iterator[tuple[str, str, list[ShownToken]]]:
    """Yield the colour, the tooltip and the tokens of each forward."""
    for forward, group in groupby(answer.tokens_shown, key=lambda piece: piece.forward):
        tokens = list(group)
        count = f"{len(tokens)} tokens" if len(tokens) > 1 else "1 token"
        yield f"c{forward % COLOURS}", f"forward {forward + 1}: {count}", tokens


def _shown(piece: ShownToken) -> str:
    """Return the text of a token, with line ends and empty texts made visible."""
    return piece.text.replace("\n", "⏎\n") if piece.text else "·"


def _share(value: float | None, spread: float | None = None, digits: int = 1) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}%}" + ("" if spread is None else f" ± {100 * spread:.{digits}f}")


def _number(value: float | None, spread: float | None = None, digits: int = 2) -> str:
    if value is None:
        return "-"
    return f"{value:,.{digits}f}" + ("" if spread is None else f" ± {spread:,.{digits}f}")


def _change(figures: Metrics) -> str:
    """Return the difference in accuracy from autoregressive decoding, in percentage points, with the 95 % interval."""
    paired = figures.against_ar
    if paired is None:
        return "-"
    return f"{100 * paired.difference:+.2f} ({100 * paired.low:+.2f} to {100 * paired.high:+.2f})"
