"""The live view in a real browser."""

import re

import httpx2
import pytest
from playwright.sync_api import Page, expect

from mars_ray.serve.http import control_routes as live_feed
from tests.samples import Cli
from tests.serve.endpoint_samples import MESSAGES, Served, config_of, served
from tests.web.test_playground import give_key

pytestmark = pytest.mark.browser

SIMULATED = """async (replicas) => {
  const { take, draw } = await import("/web/cluster.js");
  const figures = ["load", "threshold", "block", "tokens_s", "tokens_per_forward", "agreement", "queue"];
  const names = Array.from({ length: replicas }, (_, number) => `replica-${number}`);
  const began = Date.now() / 1000 - 900;
  for (let frame = 0; frame < 180; frame += 1) {
    const values = names.map((_, n) => [(n * 7 + frame) % 10 / 10, 0.95, 4, 900 + (n % 50), 2.5, null, n % 3]);
    take({ controller: "simulated", frame: { unix_s: began + 5 * frame, replicas: names, figures, values } });
  }
  const empty = { classes: [], curve: [], warnings: [] };
  const status = { policy: "capacity", desired_replicas: replicas, price_per_hour: null, ...empty };
  const models = ["simulated"];
  take({ now: { controller: "simulated", unix_s: began + 900, status, replicas, models, jobs: [] } });
  await new Promise(requestAnimationFrame);
  await new Promise(requestAnimationFrame);
  take({ frame: { unix_s: began + 900, replicas: names, figures, values: names.map(() => [1, 1, 1, 1, 1, 1, 1]) } });
  const before = performance.now();
  draw();
  return performance.now() - before;
}"""


def watched(page: Page, endpoint: Served, key: str) -> Page:
    page.goto(f"{endpoint.url}/cluster")
    give_key(page, key)
    for _ in range(6):
        endpoint.beat()
    expect(page.locator("#classes tr").first).to_be_visible()
    return page


def beaten(page: Page, endpoint: Served) -> None:
    """Let enough time pass for a frame."""
    before = page.locator("#updated").inner_text()
    for _ in range(5):
        endpoint.beat()
    expect(page.locator("#updated")).not_to_have_text(before)


def test_a_key_that_may_only_use_is_told_so(page: Page, locked: Served, keys: dict[str, str]) -> None:
    page.goto(f"{locked.url}/cluster")
    give_key(page, keys["use"])
    expect(page.locator("#key-says")).to_have_text("This path needs a key with the role operate.")
    expect(page.locator("#live")).to_be_hidden()


def test_the_live_view_follows_the_load(page: Page, locked: Served, keys: dict[str, str]) -> None:
    watched(page, locked, keys["operate"])
    tiles = page.locator("#tiles")
    expect(tiles).to_contain_text("fixed")
    seen = page.locator("#series .spark-now").nth(3)
    with httpx2.Client(base_url=locked.url, headers={"authorization": f"Bearer {keys['use']}"}) as client:
        for _ in range(3):
            ask = {"model": "bundled", "messages": MESSAGES, "temperature": 0}
            client.post("/v1/chat/completions", json=ask, timeout=60).raise_for_status()
    beaten(page, locked)
    expect(seen).to_have_text(re.compile("[1-9]"))
    page.locator("#replicas").evaluate("each => each.closest('details').open = true")
    expect(page.locator("#replicas tr")).to_have_count(1)


def test_an_override_set_in_the_page_is_seen_by_status_and_cleared_there(
    page: Page, locked: Served, keys: dict[str, str], mars_ray: Cli
) -> None:
    watched(page, locked, keys["operate"])
    page.get_by_role("button", name="Set the threshold of class standard").click()
    page.locator("#override-value").fill("0.95")
    page.locator("#override").get_by_role("button", name="Set").click()
    expect(page.locator("#confirm-says")).to_contain_text("class standard to 0.95 for 10 minutes?")
    page.get_by_role("button", name="Yes").click()
    expect(page.locator("#notices")).to_contain_text("Done")
    locked.beat()
    _, out, _ = mars_ray("status", "--once", "--url", locked.url, "--api-key", keys["operate"])
    assert re.search(r"standard\W+0\.95 .*set by an operator", out), out
    expect(page.locator("#classes tr").first).to_contain_text("set by an operator until")
    page.get_by_role("button", name="Clear the threshold of class standard").click()
    with page.expect_response(lambda answer: answer.request.method == "DELETE"):
        page.get_by_role("button", name="Yes").click()
    locked.beat()
    expect(page.locator("#classes tr").first).not_to_contain_text("set by an operator")


def test_a_stream_ends_by_itself_and_the_view_goes_on_from_there(
    page: Page, locked: Served, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_feed, "LASTS_S", 0.1)
    watched(page, locked, keys["operate"])
    beaten(page, locked)
    with page.expect_request(re.compile("controller=.+&after=[1-9]")) as again:
        pass
    text = httpx2.get(again.value.url, headers={"authorization": f"Bearer {keys['operate']}"}).text
    assert '"now"' in text and '"frame"' not in text, "no frame is sent twice"
    expect(page.locator("#says")).to_have_class("soft")


def test_a_restart_of_the_controller_is_told_and_what_was_before_stays(
    page: Page, locked: Served, keys: dict[str, str]
) -> None:
    watched(page, locked, keys["operate"])
    beaten(page, locked)
    shown = page.locator("#heat").evaluate("each => each.width")
    locked.control.restart()
    for _ in range(6):
        locked.beat()
    expect(page.locator("#notices")).to_contain_text("The controller was restarted")
    assert page.locator("#heat").evaluate("each => each.width") >= shown


@pytest.mark.parametrize("replicas", [100, 1000])
def test_many_replicas_are_one_heat_map_and_a_short_table(
    page: Page, locked: Served, keys: dict[str, str], replicas: int
) -> None:
    page.goto(f"{locked.url}/cluster")
    expect(page.locator("#key-dialog")).to_be_visible()
    took_ms = page.evaluate(SIMULATED, replicas)
    assert page.locator("#heat").evaluate("each => [each.width, each.height]") == [180, replicas]
    assert page.locator("#replicas tr").count() == 100
    assert page.evaluate("document.querySelectorAll('*').length") < 2500
    print(f"{replicas} replicas are drawn in {took_ms:.0f} ms")


def test_a_rehearsal_is_named_above_all_figures(page: Page) -> None:
    with served(config_of(engine={"rehearse": "h200/qwen2.5-7b"})) as endpoint:
        page.goto(f"{endpoint.url}/cluster")
        for _ in range(6):
            endpoint.beat()
        expect(page.locator("#figures-notice")).to_contain_text("modelled step time: h200/qwen2.5-7b/vllm (")
        page.goto(f"{endpoint.url}/")
        expect(page.locator("#figures-notice")).to_have_text("modelled step time: h200/qwen2.5-7b/vllm")


def test_without_a_rehearsal_the_page_names_none(page: Page, locked: Served, keys: dict[str, str]) -> None:
    expect(watched(page, locked, keys["operate"]).locator("#figures-notice")).to_be_hidden()
