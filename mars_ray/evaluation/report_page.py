"""Render the report of an evaluation as one self-contained HTML file.

It shows some answers that differ from autoregressive decoding token by token; answers that became wrong come first,
spread over the tasks. Prompts, answers and names are escaped, and the page's Content-Security-Policy forbids requests
and all scripts but its own.
"""

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, zip_longest
from pathlib import Path

import numpy as np

from mars_ray.evaluation.results import Metrics, Results
from mars_ray.evaluation.scorer import Row, Scores, read_answers, row_id
from mars_ray.evaluation.settings import AR, EXACT
from mars_ray.evaluation.tasks import Question, Task
from mars_ray.web.report import Axis, Chart, Line, Point, render

EXAMPLES = 3
"""Maximum number of examples per setting."""
SPECIAL = (AR.name, EXACT.name)
MARGIN = 0.06
"""Margin around the points, as a share of their range."""
COLOURS = 4
"""Number of background colours, which alternate so that neighbouring forwards differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToken:
    """One token of an answer in the report."""

    text: str
    forward: int
    """Index of the forward that gave the token, from 0."""
    same: bool
    """True if autoregressive decoding has the same token at this position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownAnswer:
    """An answer in the report, with its tokens."""

    right: bool
    tokens: int
    forwards: int
    tokens_shown: tuple[ShownToken, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A question, and the answers to it by `ar` and by another setting."""

    question: Question
    ar: ShownAnswer
    other: ShownAnswer


def disagreements(
    scores: Scores, tasks: Sequence[Task], settings: Sequence[str], folder: Path, token_bytes: Sequence[bytes]
) -> dict[str, list[Disagreement]]:
    """Return the examples to show for each setting; settings without examples are left out."""
    questions = [question for task in tasks for question in task.questions]
    indices = {setting: _choose(scores, setting) for setting in settings if setting != AR.name}
    ids = {
        row_id(questions[number], name)
        for setting, numbers in indices.items()
        for number in numbers
        for name in (setting, AR.name)
    }
    rows = {row["id"]: row for batch in read_answers(folder, ids) for row in batch} if ids else {}
    return {
        setting: [_disagreement(scores, questions[number], number, setting, rows, token_bytes) for number in numbers]
        for setting, numbers in indices.items()
        if numbers
    }


def _choose(scores: Scores, setting: str) -> list[int]:
    """Return the indices of the questions to show."""
    column = scores.settings[setting]
    ar = scores.settings[AR.name]
    differs = column.answered & ar.answered & (column.key != ar.key)
    change = column.right - ar.right
    indices: list[int] = []
    for verdict in (change < 0, change > 0, change == 0):
        by_task = [np.flatnonzero(differs & verdict & (scores.task == task)) for task in range(len(scores.tasks))]
        in_turns = chain.from_iterable(zip_longest(*(numbers[:EXAMPLES] for numbers in by_task)))
        indices += [int(number) for number in in_turns if number is not None]
    return indices[:EXAMPLES]


def _disagreement(
    scores: Scores,
    question: Question,
    number: int,
    setting: str,
    rows: Mapping[str, Row],
    token_bytes: Sequence[bytes],
) -> Disagreement:
    ar_row = rows[row_id(question, AR.name)]
    setting_row = rows[row_id(question, setting)]

    def shown(row: Row, name: str) -> ShownAnswer:
        return ShownAnswer(
            right=bool(scores.settings[name].right[number]),
            tokens=row["tokens"],
            forwards=row["forwards"],
            tokens_shown=tuple(tokens_shown(row["token_ids"], row["accepted"], ar_row["token_ids"], token_bytes)),
        )

    return Disagreement(question=question, ar=shown(ar_row, AR.name), other=shown(setting_row, setting))


def tokens_shown(
    tokens: Sequence[int], accepted_lengths: Sequence[int], ar_tokens: Sequence[int], token_bytes: Sequence[bytes]
) -> Iterator[ShownToken]:
    """Yield the tokens with their texts. A character that spans several tokens is shown with the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    forwards = [forward for forward, gain in enumerate(accepted_lengths) for _ in range(gain)]
    for index, (token, forward) in enumerate(zip(tokens, forwards, strict=True)):
        encoded = token_bytes[token] if token < len(token_bytes) else b""
        text = decoder.decode(encoded, final=index + 1 == len(tokens))
        yield ShownToken(text=text, forward=forward, same=index < len(ar_tokens) and ar_tokens[index] == token)


def evaluate_page(results: Results, examples: Mapping[str, Sequence[Disagreement]]) -> str:
    """Return the report as HTML."""
    return render(
        "evaluation/report_page.html",
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


def charts_of(results: Results) -> list[Chart]:
    """Return the charts that have data."""
    by_forward = [
        _point(name, metrics, metrics.tokens_per_forward, metrics.tokens_per_forward_std or 0.0)
        for name, metrics in results.overall.items()
        if metrics.tokens_per_forward is not None
    ]
    by_second = [
        _point(name, results.overall[name], speed.tokens_per_s, speed.tokens_per_s_std)
        for name, speed in results.speed.settings.items()
    ]
    # Leave out settings that never accept a second token.
    stops = {name: counts for name, counts in results.stops.items() if name.startswith("threshold") and any(counts[1:])}
    charts = [
        _quality("Accuracy against tokens per forward", by_forward),
        _quality("Accuracy against tokens per second", by_second),
    ]
    if stops:
        charts.append(_stops("Share of the forwards that gave 1, 2, … tokens", stops))
    return charts


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the Pareto front of the points, slowest first."""

    def dominated(point: Point) -> bool:
        return any(
            rival.x >= point.x and rival.y >= point.y and (rival.x, rival.y) != (point.x, point.y) for rival in points
        )

    return sorted((point for point in points if not dominated(point)), key=lambda point: point.x)


def _point(name: str, figures: Metrics, x: float, spread: float) -> Point:
    return Point(
        name=name.removeprefix("threshold "),
        kind="special" if name in SPECIAL else "",
        x=x,
        y=100 * figures.accuracy,
        x_within=(x - spread, x + spread),
        y_within=(100 * figures.accuracy_low, 100 * figures.accuracy_high),
    )


def _quality(title: str, points: Sequence[Point]) -> Chart:
    """Return the chart of accuracy against speed. A line joins the Pareto front; all other points are hollow."""
    front = pareto_front(points)
    return Chart(
        title=title,
        lines=[Line(at=[(point.x, point.y) for point in front])],
        points=[point if point in front else replace(point, kind=f"{point.kind} hollow") for point in points],
        x=_around([end for point in points for end in point.x_within]),
        y=_around([end for point in points for end in point.y_within], " %"),
    )


def _stops(title: str, stops: Mapping[str, Sequence[int]]) -> Chart:
    """Return a chart of how often a forward gave 1, 2, … tokens, with one line per setting."""
    lines = [
        Line(name=name, at=[(gain, 100 * count / (sum(counts) or 1)) for gain, count in enumerate(counts, start=1)])
        for name, counts in stops.items()
    ]
    return Chart(title=title, lines=lines, y=Axis(unit=" %"))


def _around(values: Sequence[float], unit: str = "") -> Axis:
    margin = MARGIN * (max(values) - min(values)) or 1.0
    return Axis(ends=(min(values) - margin, max(values) + margin), unit=unit)
