"""What pages look like to axe-core, and to an eye: pictures go to the folder that MARS_RAY_PICTURES names."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.serve.endpoint_samples import Served
from tests.web.test_cluster import watched
from tests.web.test_playground import PROMPT, ask, ended, opened

BELIEVABLE = """async () => {
  const { take } = await import("/web/cluster.js");
  const figures = ["load", "threshold", "block", "tokens_s", "tokens_per_forward", "agreement", "queue"];
  const replicas = Array.from({ length: 100 }, (_, number) => `replica-${number}`);
  const began = Date.now() / 1000 + 5; // what was real is too old then
  const noise = (seed) => ((Math.sin(seed * 12.9898) * 43758.5453) % 1 + 1) % 1;
  for (let frame = 0; frame < 180; frame += 1) {
    const wave = 0.55 + 0.45 * Math.sin((frame - 40) / 28);
    const threshold = wave > 0.8 ? 0.95 : wave > 0.7 ? 0.98 : 1;
    const values = replicas.map((_, n) => {
      const load = Math.min(1, Math.max(0, wave * (0.8 + 0.4 * noise(n)) + 0.2 * noise(n * 181 + frame) - 0.1));
      const gained = (threshold < 1 ? 3.1 : 2.4) + 0.2 * noise(frame);
      const agreed = 0.996 + 0.002 * noise(n);
      return [load, threshold, wave > 0.9 ? 2 : 4, 900 * load * gained, gained, agreed, load >= 1 ? 3 : 0];
    });
    take({ frame: { unix_s: began + 5 * frame, replicas, figures, values } });
  }
}"""

PICTURES = os.environ.get("MARS_RAY_PICTURES")


def violations(page: Page) -> list[str]:
    found = Axe().run(page).response["violations"]
    return [f"{each['id']}: {node['html']}" for each in found for node in each["nodes"]]


def pictured(page: Page, name: str) -> None:
    if PICTURES:
        page.screenshot(path=Path(PICTURES) / f"{name}.png", full_page=True)


def playground(page: Page, endpoint: Served, keys: dict[str, str]) -> None:
    opened(page, endpoint, keys["use"])
    page.locator("#race").check()
    ask(page, PROMPT, 0.5)
    for number in (0, 1):
        ended(page, number)
    page.locator(".token").nth(6).click()


def cluster(page: Page, endpoint: Served, keys: dict[str, str]) -> None:
    watched(page, endpoint, keys["operate"])
    page.evaluate(BELIEVABLE)


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_dialogs_have_no_violation(page: Page, locked: Served, keys: dict[str, str]) -> None:
    page.goto(f"{locked.url}/cluster")
    expect(page.locator("#key-dialog")).to_be_visible()
    assert violations(page) == []
    watched(page, locked, keys["operate"])
    page.get_by_role("button", name="Set the threshold of class standard").click()
    expect(page.locator("#override")).to_be_visible()
    assert violations(page) == []
