"""The report: all of its figures, nothing of its rows as markup, nothing from elsewhere."""

import re
from html.parser import HTMLParser

import pytest

from mars_ray.evaluation.report_page import (
    Disagreement,
    ShownAnswer,
    ShownToken,
    charts_of,
    evaluate_page,
    pareto_front,
)
from mars_ray.web.report import Point
from tests.evaluation.evaluate_samples import question, results

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"' & {{ 7 * 7 }}"


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
    return Seen(evaluate_page(results(tasks=(HOSTILE, "b"), model=HOSTILE), examples))


def test_nothing_that_was_asked_or_answered_becomes_markup() -> None:
    seen = page()
    assert [tag for tag, _ in seen.tags].count("script") == 1
    assert "img" not in {tag for tag, _ in seen.tags}
    assert seen.text.count(HOSTILE) >= 4
    assert all(not name.startswith("on") for _, attributes in seen.tags for name in attributes)


def test_every_figure_of_the_results_is_on_the_page() -> None:
    text = page().text
    for told in ("90.0% ± 1.0", "-1.00 (-2.00 to +0.00)", "0.62", "4.00 ± 0.10", "3,000 ± 10", "99.90%", "abc", "0f"):
        assert told in text
    assert re.search(r"exact\s*10\s*10.0%\s*20.0%\s*30.0%\s*40.0%", text)


def test_tokens_of_one_forward_have_one_background_and_others_than_ar_chose_are_marked() -> None:
    tokens = [each for tag, each in page().tags if tag == "span" and (each.get("class") or "").startswith("token")]
    assert [each["class"] for each in tokens] == ["token", "token other", "token c0", "token c0 other", "token c1"]
    assert [each["title"] for each in tokens][-2:] == ["forward 1: 2 tokens", "forward 2: 1 token"]


def test_a_page_without_disagreements_says_so() -> None:
    assert "Nowhere." in evaluate_page(results(), {})


def point(name: str, x: float, accuracy: float) -> Point:
    return Point(name=name, x=x, y=accuracy, x_within=(x, x), y_within=(accuracy, accuracy))


def test_the_best_settings_are_those_that_none_beats() -> None:
    points = [point("ar", 1, 0.9), point("slow", 0.5, 0.9), point("fast", 3, 0.8), point("bad", 2, 0.7)]
    assert [each.name for each in pareto_front(points)] == ["ar", "fast"]
    assert [each.name for each in pareto_front([point("one", 1, 0.5), point("two", 1, 0.5)])] == ["one", "two"]


def test_charts_show_every_setting_and_its_spread() -> None:
    forwards, clock, stops = charts_of(results())
    assert [each.name for each in forwards.points] == [each.name for each in clock.points] == ["ar", "exact", "0.9"]
    assert [each.kind for each in forwards.points] == ["special hollow", "special", ""]
    assert forwards.points[1].x_within == (2.9, 3.1) and forwards.points[1].y_within == pytest.approx((88, 92))
    assert [line.name for line in stops.lines] == ["threshold 0.9"]
    assert stops.lines[0].at == [(1, 40.0), (2, 30.0), (3, 20.0), (4, 10.0)]
