"""The report: all of its figures, nothing of its rows as markup, nothing from elsewhere."""

import re
from html.parser import HTMLParser

import pytest

from mars_ray.evaluation.report.charts import (
    DARK,
    LIGHT,
    Point,
    best,
    by_clock,
    by_forwards,
    quality_chart,
    stops_chart,
)
from mars_ray.evaluation.report.page import Picture, evaluate_page
from mars_ray.evaluation.scoring.disagreements import Disagreement, ShownAnswer, ShownToken
from tests.evaluation.evaluate_samples import question, results

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"' & {{ 7 * 7 }}"
PNG = b"\x89PNG\r\n\x1a\n"


class Seen(HTMLParser):
    """Tags and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        self.text += data


def shown(right: bool, *texts: str) -> ShownAnswer:
    tokens_shown = tuple(ShownToken(text=text, forward=place // 2, same=place != 1) for place, text in enumerate(texts))
    return ShownAnswer(right=right, tokens=len(tokens_shown), forwards=2, tokens_shown=tokens_shown)


def page() -> Seen:
    examples = {
        "threshold 0.9": [
            Disagreement(
                question=question(prompt=HOSTILE), ar=shown(True, "a", "b"), other=shown(False, HOSTILE, "c", "d")
            )
        ]
    }
    pictures = [Picture(title="t", says="s", light=PNG + b"1", dark=PNG + b"2")]
    return Seen(evaluate_page(results(tasks=(HOSTILE, "b"), model=HOSTILE), examples, pictures))


def test_nothing_that_was_asked_or_answered_becomes_markup() -> None:
    seen = page()
    assert "script" not in {tag for tag, _ in seen.tags}
    assert seen.text.count(HOSTILE) >= 4
    assert all(not name.startswith("on") for _, attributes in seen.tags for name in attributes)


def test_the_page_fetches_nothing() -> None:
    for _, attributes in page().tags:
        for name in ("src", "srcset", "href"):
            assert (attributes.get(name) or "data:").startswith("data:")
    [policy] = [each["content"] for tag, each in page().tags if each.get("http-equiv") == "Content-Security-Policy"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def test_every_figure_of_the_results_is_on_the_page() -> None:
    text = page().text
    for told in ("90.0% ± 1.0", "-1.00 (-2.00 to +0.00)", "0.62", "4.00 ± 0.10", "3,000 ± 10", "99.90%", "abc", "0f"):
        assert told in text
    assert re.search(r"exact\s*10\s*10.0%\s*20.0%\s*30.0%\s*40.0%", text)


def test_tokens_of_one_forward_have_one_background_and_others_than_ar_chose_are_marked() -> None:
    tags = page().tags
    coloured = [each["class"] for tag, each in tags if tag == "span" and re.fullmatch(r"c\d", each.get("class") or "")]
    assert coloured == ["c0", "c1"]
    assert [each["title"] for tag, each in tags if (each.get("title") or "").startswith("forward")][-2:] == [
        "forward 1: 2 tokens",
        "forward 2: 1 token",
    ]
    assert [each.get("class") for tag, each in tags if tag == "i"][-3:] == [None, "other", None]


def test_a_page_without_disagreements_says_so() -> None:
    assert "Nowhere." in evaluate_page(results(), {}, [])


def point(name: str, x: float, accuracy: float) -> Point:
    return Point(name=name, x=x, x_std=0.0, accuracy=accuracy, low=accuracy, high=accuracy)


def test_the_best_settings_are_those_that_none_beats() -> None:
    points = [point("ar", 1, 0.9), point("slow", 0.5, 0.9), point("fast", 3, 0.8), point("bad", 2, 0.7)]
    assert [each.name for each in best(points)] == ["ar", "fast"]
    assert [each.name for each in best([point("one", 1, 0.5), point("two", 1, 0.5)])] == ["one", "two"]


@pytest.mark.parametrize("look", [LIGHT, DARK])
def test_charts_are_pngs_and_the_same_results_give_the_same_file(look: object) -> None:
    found = results()
    for points in (by_forwards(found), by_clock(found)):
        drawn = quality_chart(points, "x", look)  # type: ignore[arg-type]
        assert drawn.startswith(PNG)
        assert drawn == quality_chart(points, "x", look)  # type: ignore[arg-type]
    assert stops_chart(found.stops, look).startswith(PNG)  # type: ignore[arg-type]
