"""The playground in a real browser."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import httpx2
import pytest
from playwright.sync_api import Page, expect

from tests.serve.endpoint_clients import no_longer_asked, settled
from tests.serve.endpoint_samples import MESSAGES, Served
from tests.web.conftest import WAIT_MS

pytestmark = pytest.mark.browser

PROMPT = MESSAGES[0]["content"]


def opened(page: Page, endpoint: Served, key: str) -> Page:
    page.goto(f"{endpoint.url}/")
    give_key(page, key)
    expect(page.locator("#model option")).to_have_count(1)
    return page


def give_key(page: Page, key: str) -> None:
    expect(page.locator("#key-dialog")).to_be_visible()
    page.locator("#key").fill(key)
    page.get_by_role("button", name="Use key").click()


def ask(page: Page, prompt: str, threshold: float | None = None) -> None:
    if threshold is not None:
        page.locator("#mode-a").select_option("threshold")
        page.locator("#threshold-a").fill(str(threshold))
    page.locator("#prompt").fill(prompt)
    page.keyboard.press("Enter")


def ended(page: Page, number: int = 0) -> None:
    expect(page.locator(".reply h2").nth(number)).to_contain_text("after", timeout=WAIT_MS)


def tokens_per_forward(page: Page, number: int) -> float:
    return float(page.locator(".reply").nth(number).locator("dd").first.inner_text())


def test_an_answer_arrives_tinted_by_forward_and_says_of_each_token_how_it_came(
    page: Page, locked: Served, keys: dict[str, str]
) -> None:
    opened(page, locked, keys["use"])
    ask(page, PROMPT, 0.4)
    ended(page)
    # How far a step looks ahead depends on measured times, and so do later tokens at this threshold.
    assert page.locator(".answer").inner_text().startswith('{"name": "Oscar"')
    forwards = [int(each.get_attribute("data-forward") or 0) for each in page.locator(".token").all()]
    assert sorted(forwards) == forwards and len(set(forwards)) < len(forwards)
    for number, each in enumerate(page.locator(".token").all()):
        expect(each).to_have_class(re.compile(rf"\bc{forwards[number] % 4}\b"))
    ahead = next(number for number in range(1, len(forwards)) if forwards[number] == forwards[number - 1])
    page.locator(".token").nth(ahead).hover()
    expect(page.locator(".detail")).to_contain_text(
        re.compile(  # the model checks a token in the next forward, if there is one
            r"forward \d+, token 2 of \d+, confidence [\d.]+ %\. "
            + (
                r"Whether one-at-a-time decoding chooses the same token is not known"
                if forwards[ahead] == forwards[-1]
                else r"One-at-a-time decoding (chooses|would)"
            )
        )
    )
    page.locator(".answer").focus()
    page.keyboard.press("Home")
    expect(page.locator(".detail")).to_contain_text("forward 1")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".chosen")).to_have_text(page.locator(".token").nth(1).inner_text())


def test_the_slider_changes_the_tokens_per_forward(page: Page, locked: Served, keys: dict[str, str]) -> None:
    opened(page, locked, keys["use"])
    ask(page, PROMPT, 0.99)
    ended(page)
    page.locator("#clear").click()
    expect(page.locator("#model option")).to_have_count(1)
    ask(page, PROMPT, 0.3)
    ended(page)
    low = tokens_per_forward(page, 0)
    page.locator("#clear").click()
    expect(page.locator("#model option")).to_have_count(1)
    page.locator("#mode-a").select_option("ar")
    ask(page, PROMPT)
    ended(page)
    assert tokens_per_forward(page, 0) == 1.0 < low


def test_a_wrong_key_is_told_and_a_right_one_goes_on_and_is_kept_in_the_tab(
    page: Page, locked: Served, keys: dict[str, str]
) -> None:
    page.goto(f"{locked.url}/")
    give_key(page, "mars-wrong")
    expect(page.locator("#key-says")).to_have_text("This endpoint does not know this key.")
    give_key(page, keys["use"])
    expect(page.locator("#model option")).to_have_count(1)
    assert page.evaluate("Object.values(sessionStorage)") == [keys["use"]]
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]


def test_what_looks_like_html_is_text(page: Page, locked: Served, keys: dict[str, str]) -> None:
    opened(page, locked, keys["use"])
    bad = '<img src=x onerror="window.broken = 1">'
    ask(page, bad)
    ended(page)
    assert page.locator(".question").inner_text() == bad
    assert page.locator("#conversation img").count() == 0
    assert page.evaluate("window.broken") is None


@pytest.mark.parametrize("path", ["/", "/cluster"])
def test_a_page_takes_less_than_100_kb(page: Page, locked: Served, path: str) -> None:
    sizes: list[int] = []
    page.on("response", lambda answer: sizes.append(len(answer.body())) if answer.ok else None)
    page.goto(f"{locked.url}{path}", wait_until="networkidle")
    assert len(sizes) >= 4
    assert sum(sizes) < 100_000


def metric(endpoint: Served, keys: dict[str, str], name: str) -> float:
    text = httpx2.get(f"{endpoint.url}/metrics", headers={"authorization": f"Bearer {keys['operate']}"}).text
    [value] = re.findall(rf"^{name}\{{.*\}} (\S+)$", text, re.MULTILINE)
    return float(value)


def test_stop_stops_the_engine_within_a_step(page: Page, locked: Served, keys: dict[str, str]) -> None:
    """The engine is held while the stop goes to it: all its steps but the one it was at gave the answer something."""
    opened(page, locked, keys["use"])
    steps, gave = (metric(locked, keys, name) for name in ("mars:engine_steps", "mars:accepted_tokens_count"))
    page.locator("details summary").click()
    page.locator("#max-tokens").fill("4096")
    page.locator("#schema").fill('{"type": "array", "minItems": 3000, "items": {"type": "integer"}}')
    page.locator("#mode-a").select_option("ar")
    ask(page, "Count.")
    expect(page.locator(".token").nth(3)).to_be_attached()
    engine = locked.engine.process
    assert engine and locked.in_flight()[0] == 1
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        page.locator("#stop").click()
        expect(page.locator(".reply h2")).to_contain_text("stopped")
        no_longer_asked(locked)
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    settled(locked)
    taken = metric(locked, keys, "mars:engine_steps") - steps
    assert taken - (metric(locked, keys, "mars:accepted_tokens_count") - gave) in (0, 1)
    assert metric(locked, keys, "vllm:num_requests_running") == 0
    assert metric(locked, keys, "mars:engine_steps") - steps == taken


def copied(page: Page, what: str) -> str:
    page.get_by_role("button", name=what).click()
    page.get_by_role("button", name="Copy").click()
    expect(page.locator("#copy")).to_have_text("Copied")
    page.get_by_role("button", name="Close").click()
    text: str = page.evaluate("navigator.clipboard.readText()")
    return text


def test_the_copies_as_curl_and_as_python_give_the_answer_of_the_page(
    page: Page, locked: Served, keys: dict[str, str]
) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened(page, locked, keys["use"])
    page.locator("details summary").click()
    page.locator("#schema").fill(
        '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}, "required": ["name"],'
        ' "additionalProperties": false}'
    )
    page.locator("#prompt").fill('It\'s "Oscar" \\ $HOME `id`\n34, é 🙂')
    curl, python = copied(page, "As curl"), copied(page, "As Python")
    page.locator("#send").click()
    ended(page)
    shown = page.locator(".answer").inner_text()
    assert json.loads(shown).keys() == {"name"}
    environment = os.environ | {"MARS_RAY_API_KEY": keys["use"]}

    def run(*command: str) -> str:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run(sys.executable, "-c", python) == shown + "\n"
    if shutil.which("curl"):
        answer = json.loads(run("sh", "-c", curl))
        assert answer["choices"][0]["message"]["content"] == shown
    else:
        pytest.skip("no curl on the PATH; the copy as Python ran")


def test_the_copies_end_with_a_turn_of_the_user_before_and_after_an_answer(
    page: Page, locked: Served, keys: dict[str, str]
) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened(page, locked, keys["use"])
    example = page.locator("#prompt").get_attribute("placeholder")
    assert asked_in(copied(page, "As Python")) == [{"role": "user", "content": example}]
    ask(page, PROMPT)
    ended(page)
    assert asked_in(copied(page, "As Python")) == [{"role": "user", "content": PROMPT}]
    page.locator("#prompt").fill("And now?")
    assert [each["role"] for each in asked_in(copied(page, "As Python"))] == ["user", "assistant", "user"]


def asked_in(python: str) -> list[dict[str, str]]:
    """The messages that a copy as Python sends."""
    [messages] = re.findall(r"^    messages=(.*),$", python, re.MULTILINE)
    found: list[dict[str, str]] = json.loads(messages)
    return found


def test_the_playground_opens_at_exact(page: Page, locked: Served, keys: dict[str, str]) -> None:
    opened(page, locked, keys["use"])
    expect(page.locator("#mode-a")).to_have_value("exact")
