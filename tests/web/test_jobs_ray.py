"""Batch jobs in the live view: `mars-ray generate` on the cluster of an endpoint, both as a user starts them."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.serve.cluster_samples import COMMAND, SOON, STEP_SECONDS, Cluster, cluster, deploy_file

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]
ROWS = 4000


@pytest.fixture
def roomy(tmp_path: Path) -> Iterator[Cluster]:
    """An endpoint that leaves the CPUs to jobs."""
    fields = {"control": SOON, "engine": {"max_num_seqs": 4}}
    config = deploy_file(tmp_path / "serve.yaml", fields, ray_actor_options={"num_cpus": 0})
    with cluster("--config", str(config)) as started:
        yield started


@pytest.fixture
def view(browser: Browser, roomy: Cluster) -> Iterator[Page]:
    """The live view, closed before the endpoint ends."""
    with browser.new_page() as page:
        page.set_default_timeout(1000 * STEP_SECONDS)
        page.goto(f"{roomy.url}/cluster")
        yield page


def address_of(running: Cluster) -> str:
    """Where Ray itself listens, as its parts are told."""
    [raylet] = [each for each in running.processes("raylet/raylet") if each.name() == "raylet"]
    [address] = [word.partition("=")[2] for word in raylet.cmdline() if word.startswith("--gcs-address=")]
    return address


def test_a_job_with_a_deadline_on_the_cluster_is_shown_with_its_progress_and_goes_when_it_ends(
    view: Page, roomy: Cluster, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"Say {number}."}) + "\n" for number in range(ROWS)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    words = (
        f"generate --model bundled --input {rows} --output {tmp_path / 'out'} --deadline 20m --max-tokens 64".split()
    )
    expect(view.locator("#classes tr").first).to_be_visible(timeout=1000 * STEP_SECONDS)
    expect(view.locator("#jobs-card")).to_be_hidden()
    with subprocess.Popen(
        [str(COMMAND), *words, "--workers", "1"],
        env=environment | {"RAY_ADDRESS": address_of(roomy), "RAY_AUTH_MODE": "token"},
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        try:
            row = view.locator("#jobs tr")
            expect(row).to_contain_text(re.compile(r"in 1\d\.\d min"), timeout=1000 * STEP_SECONDS)
            progress = row.locator("progress")
            first = float(progress.get_attribute("value") or 0)
            view.wait_for_function(
                "first => Number(document.querySelector('#jobs progress')?.value) > first + 0.02", arg=first
            )
            expect(row.locator("td").nth(5)).to_have_text("1")
            expect(row).to_contain_text("runs")
        finally:
            job.terminate()
            _, said = job.communicate(timeout=STEP_SECONDS)
    assert "Stopped after" in said or job.returncode in (0, 130, 143), said
    expect(view.locator("#jobs-card")).to_be_hidden(timeout=1000 * STEP_SECONDS)
