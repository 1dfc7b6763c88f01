"""A real browser, and endpoints for it to look at."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.serve.endpoint_samples import Served, config_of, served
from tests.serve.key_samples import add_key

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WAIT_MS = 60_000


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium on the PATH; Debian has it as the package chromium")
    with sync_playwright() as playwright:
        sandbox = os.geteuid() != 0  # Chromium has none for root
        running = playwright.chromium.launch(executable_path=CHROMIUM, chromium_sandbox=sandbox)
        yield running
        running.close()


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    path: Path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    return {"file": str(path), "use": add_key(path, "ada", "use"), "operate": add_key(path, "root", "operate")}


@pytest.fixture(scope="session")
def locked(keys: dict[str, str]) -> Iterator[Served]:
    """An endpoint with keys."""
    config = config_of(keys=keys["file"], threshold=0.99, control={"policy": "fixed"})
    with served(config) as endpoint:
        yield endpoint


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page of its own; what its console complains of, or what leaves the endpoint, fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(WAIT_MS)
    opened = context.new_page()
    wrong: list[str] = []
    asked: set[str] = set()
    opened.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("request", lambda request: asked.add(request.url))
    yield opened
    origin = "/".join(opened.url.split("/")[:3])
    context.close()
    assert [each for each in wrong if "401" not in each and "403" not in each] == []
    assert [url for url in asked if not url.startswith((origin + "/", "data:"))] == []
