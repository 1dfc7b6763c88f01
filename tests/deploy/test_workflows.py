"""What runs for strangers' pull requests may read the repository, and is what it was when it was looked at."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.name)
def workflow(request: pytest.FixtureRequest) -> Any:
    return yaml.safe_load(request.param.read_text())


def test_a_workflow_may_read_and_nothing_else(workflow: Any) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in workflow["jobs"].values())


def test_actions_are_named_by_commit_and_keep_no_credentials(workflow: Any) -> None:
    steps = [step for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert steps
    for step in steps:
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step["uses"])
        if step["uses"].startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("file", ["Dockerfile", "serve_configs/vms.yaml", "docs/deploy.md", "docs/cluster.md"])
def test_no_index_beside_pypi_may_answer_for_every_package(file: str) -> None:
    text = (ROOT / file).read_text().lower().replace("_", "-")
    assert "extra-index-url" not in text
