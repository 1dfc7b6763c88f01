"""What is installed: the wheel as the build would fill it."""

import subprocess
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]


def test_the_wheel_has_every_file_of_the_package_and_the_licence() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone: what belongs to the package cannot be told from what was left there")
    builder = WheelBuilder(str(ROOT))
    shipped = {each.distribution_path for each in builder.recurse_included_files()}
    listed = subprocess.run(["git", "ls-files", "mars_ray"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(listed.stdout.splitlines()) - shipped == set()
    assert {"mars_ray/web/static/chart.js", "mars_ray/web/report.html"} <= shipped
    assert builder.metadata.core.license_files == ["LICENSE"]
