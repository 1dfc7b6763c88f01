"""The page of a job: all of its figures, nothing of its rows as markup, nothing from elsewhere."""

import dataclasses
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from mars_ray.batch.output.report import Bar, JobReport, PacePoint
from mars_ray.batch.output.report_page import _over_time, job_page

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"' & {{ 7 * 7 }}"
FULL = JobReport(
    status="complete with errors",
    rows=12_345,
    total=12_400,
    errors=17,
    errors_by_reason={HOSTILE: 16, "x" * 500: 1},
    errors_file="errors.jsonl",
    cut=4_321,
    tokens=1_234_567_890,
    forwards=345_678_901,
    tokens_per_s=98_765.4,
    tokens_per_forward=3.57,
    seconds=86_461.0,
    runs=3,
    workers=2,
    model="bundled",
    settings={"template": HOSTILE, "seed": None},
    output="out",
    pace=tuple(
        PacePoint(second=float(n), rows=n, errors=0, tokens=100 * n, forwards=n, threshold=0.9) for n in range(1, 50)
    ),
    lengths=(Bar(low=0, high=8, count=3), Bar(low=8, high=16, count=0), Bar(low=16, high=24, count=5)),
    ahead=(Bar(low=1, high=1.5, count=8),),
    samples=({"id": "a", "prompt": HOSTILE, "text": "long " * 2000},),
    deadline="ended 0:10:00 before the deadline",
    notice="modelled step time: h200/qwen2.5-7b (3 of 120 steps were slower here)",
    notes=("left out 3 files below d/out: it is the output of this job",),
)
EMPTY: dict[str, Any] = {
    "status": "stopped",
    "rows": 0,
    "errors": 0,
    "errors_by_reason": {},
    "errors_file": "",
    "cut": 0,
    "tokens": 0,
    "forwards": 0,
    "tokens_per_s": 0.0,
    "tokens_per_forward": 0.0,
    "seconds": 0.0,
    "pace": (),
    "lengths": (),
    "ahead": (),
    "samples": (),
    "deadline": "",
    "notice": "",
    "notes": (),
}


class Seen(HTMLParser):
    """Tags and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags, self.text, self.addresses = list[str](), "", list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href") or name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_every_figure_is_on_the_page() -> None:
    text = Seen(job_page(FULL)).text
    for figure in (
        "Complete with errors",
        "12,345",
        "12,400",
        "17",
        "4,321",
        "1,234,567,890",
        "98,765",
        "3.57",
        "bundled",
    ):
        assert figure in text, figure
    assert "ended 0:10:00 before the deadline" in text
    assert FULL.notice in text
    assert FULL.notes[0] in text


def test_rows_reasons_and_settings_are_text_and_no_markup() -> None:
    seen = Seen(job_page(FULL))
    assert seen.tags.count("script") == 1 and "img" not in seen.tags
    assert seen.text.count("<script>alert(1)</script>") == 4
    assert "{{ 7 * 7 }}" in seen.text


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = job_page(FULL)
    assert [address for address in Seen(text).addresses if not address.startswith("#")] == []
    assert not re.search(r"url\((?!['\"]?(data:|#))|@import", text)


@pytest.mark.parametrize("changes", [{}, {"pace": FULL.pace[:1]}, {"pace": FULL.pace[:2]}, {"total": 0}])
def test_a_job_with_next_to_nothing_has_a_page_too(changes: dict[str, Any]) -> None:
    assert "Stopped" in Seen(job_page(dataclasses.replace(FULL, **(EMPTY | changes)))).text


def test_settings_that_say_nothing_are_left_out() -> None:
    assert "seed" not in Seen(job_page(FULL)).text


def test_bursts_of_short_jobs_are_spread_and_no_token_is_lost() -> None:
    pace = tuple(
        PacePoint(second=float(n), rows=1, errors=0, tokens=900 * (n % 9 == 0), forwards=1, threshold=1.0)
        for n in range(1, 61)
    )
    [speed, _] = _over_time(pace)
    assert max(value for *_, value in speed.bars) <= 180
    assert round(sum((end - begin) * value for begin, end, value in speed.bars)) in (90, 5400)  # in minutes, or seconds


def test_the_threshold_of_joined_spans_is_the_mean_over_their_tokens() -> None:
    pace = tuple(
        PacePoint(second=float(n), rows=1, errors=0, tokens=tokens, forwards=1, threshold=threshold)
        for n, (tokens, threshold) in enumerate([(30, 0.5), (10, 0.9), (0, 1.0), (0, 1.0)] * 60, start=1)
    )
    [_, thresholds] = _over_time(pace)
    assert {round(value, 6) for *_, value in thresholds.bars} == {0.6}


def test_settings_and_samples_are_folded() -> None:
    tags = Seen(job_page(FULL)).tags
    assert tags.count("details") >= 2 + len(FULL.samples)
