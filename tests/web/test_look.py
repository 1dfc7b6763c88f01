"""What pages look like to axe-core, and to an eye: pictures go to the folder that MARS_RAY_PICTURES names."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import httpx2
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.serve.endpoint_samples import MESSAGES, Served
from tests.web.simulated import events
from tests.web.test_cluster import watched
from tests.web.test_playground import PROMPT, ask, ended, opened

pytestmark = pytest.mark.browser

TAKE = """async (events) => {
  const { take } = await import("/web/cluster.js");
  events.forEach(take);
}"""

PICTURES = os.environ.get("MARS_RAY_PICTURES")


def violations(page: Page) -> list[str]:
    found = Axe().run(page).response["violations"]
    return [f"{each['id']}: {node['html']}" for each in found for node in each["nodes"]]


def pictured(page: Page, name: str) -> None:
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / f"{name}.png", full_page=True)


def warm_up(endpoint: Served, key: str) -> None:
    """Let the engine compile its steps and learn what they take, as one that has served for a while."""
    with httpx2.Client(base_url=endpoint.url, headers={"authorization": f"Bearer {key}"}, timeout=60) as client:
        for number in range(60):
            asked = {"mode": "ar"} if number % 3 == 0 else {"mode": "threshold", "threshold": 0.5}
            body = {"model": "bundled", "messages": MESSAGES, "temperature": 0} | asked
            client.post("/v1/chat/completions", json=body).raise_for_status()


def playground(page: Page, endpoint: Served, keys: dict[str, str]) -> None:
    if PICTURES:
        warm_up(endpoint, keys["use"])
    opened(page, endpoint, keys["use"])
    page.locator("#race").check()
    ask(page, PROMPT, 0.5)
    for number in (0, 1):
        ended(page, number)
    page.locator(".token").nth(6).click()


@cache
def told() -> list[dict[str, Any]]:
    return events()


def cluster(page: Page, endpoint: Served, keys: dict[str, str]) -> None:
    page.route("**/control/live*", lambda _: None)  # nothing comes of the real one
    page.goto(f"{endpoint.url}/cluster")
    page.evaluate(TAKE, told())
    expect(page.locator("#jobs tr")).to_be_visible()


def test_the_playground_has_no_violation_as_it_opens(page: Page, locked: Served, keys: dict[str, str]) -> None:
    opened(page, locked, keys["use"])
    assert violations(page) == []


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("shown", [playground, cluster], ids=["playground", "cluster"])
def test_a_page_has_no_violation_and_no_sideways_scrolling(
    browser: Browser,
    locked: Served,
    keys: dict[str, str],
    shown: Callable[..., None],
    width: int,
    colours: Literal["light", "dark"],
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 850}, color_scheme=colours)
    page = context.new_page()
    try:
        shown(page, locked, keys)
        pictured(page, f"{shown.__name__}-{width}-{colours}")
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    finally:
        context.close()


def test_the_dialogs_have_no_violation(page: Page, locked: Served, keys: dict[str, str]) -> None:
    page.goto(f"{locked.url}/cluster")
    expect(page.locator("#key-dialog")).to_be_visible()
    assert violations(page) == []
    watched(page, locked, keys["operate"])
    page.get_by_role("button", name="Set the threshold of class standard").click()
    expect(page.locator("#override")).to_be_visible()
    assert violations(page) == []
