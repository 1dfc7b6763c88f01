"""Reports as a person opens them: a file, in a browser, without a network."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, expect

from mars_ray.batch.output.report_page import job_page
from mars_ray.evaluation.report_page import Disagreement, evaluate_page
from tests.batch.test_job_page import FULL
from tests.evaluation.evaluate_samples import figures, question, results
from tests.evaluation.test_evaluation_page import shown
from tests.web.test_look import pictured, violations

pytestmark = pytest.mark.browser


def job() -> str:
    return job_page(FULL)


def evaluation() -> str:
    examples = {
        "threshold 0.9": [
            Disagreement(question=question(), ar=shown(True, "a", "b"), other=shown(False, "c", "d", "e"))
        ]
    }
    found, names = results(), [f"threshold 0.{each}" for each in (5, 6, 7, 8)]
    found.overall.update({name: figures(0.83 + place / 50, 5.5 - place / 3) for place, name in enumerate(names)})
    fast = found.speed.settings["threshold 0.9"]
    found.speed.settings.update(
        {name: fast.model_copy(update={"tokens_per_s": 4200 - 250 * place}) for place, name in enumerate(names)}
    )
    found.stops.update({name: (5 - place, 3, 2, 4 + 2 * place) for place, name in enumerate(reversed(names))})
    return evaluate_page(found, examples)


def opened(page: Page, folder: Path, html: str) -> Page:
    (folder / "report.html").write_text(html)
    page.goto((folder / "report.html").as_uri())
    return page


@pytest.mark.parametrize(
    ("report", "charts", "says"),
    [(job, 4, r"\d+ s to \d+ s: [\d.]+k"), (evaluation, 3, r"(ar|exact|0\.9), [\d.]+: [\d.]+ %")],
    ids=["job", "evaluation"],
)
def test_a_report_draws_its_charts_without_a_network_and_says_what_is_pointed_at(
    page: Page, tmp_path: Path, report: Callable[[], str], charts: int, says: str
) -> None:
    opened(page, tmp_path, report())
    expect(page.locator("figure svg")).to_have_count(charts)
    assert page.locator("figure path").count() > charts
    page.locator("figure").first.hover()
    expect(page.locator("figure").first.locator(".hint")).to_have_text(re.compile(says))


def test_a_report_runs_no_script_but_its_own(page: Page, tmp_path: Path) -> None:
    bad = job().replace("</main>", "<img src=x onerror='document.title = 1'><script>document.title = 2</script></main>")
    said: list[str] = []
    context = page.context.browser.new_context()  # type: ignore[union-attr]
    try:
        other = context.new_page()
        other.on("console", lambda each: said.append(each.text))
        opened(other, tmp_path, bad)
        expect(other.locator("figure svg")).to_have_count(4)
        assert other.title() not in "12"
        assert len([each for each in said if "Content Security Policy" in each]) == 3, said
    finally:
        context.close()


def test_a_report_says_all_without_scripts(browser: Browser, tmp_path: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    try:
        page = opened(context.new_page(), tmp_path, job())
        expect(page.locator("[data-chart]").first).to_contain_text("the tables have the same figures")
        page.get_by_text("As tables").click()
        expect(page.get_by_role("cell", name="16 to 24")).to_be_visible()
    finally:
        context.close()


def test_the_report_of_a_job_has_no_violation(page: Page, tmp_path: Path) -> None:
    opened(page, tmp_path, job())
    assert violations(page) == []


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("report", [job, evaluation])
def test_a_report_has_no_violation_and_no_sideways_scrolling(
    browser: Browser, tmp_path: Path, report: Callable[[], str], width: int, colours: Literal["light", "dark"]
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 850}, color_scheme=colours)
    try:
        page = opened(context.new_page(), tmp_path, report())
        expect(page.locator("figure").first).to_be_visible()
        pictured(page, f"{report.__name__}-{width}-{colours}")
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    finally:
        context.close()
