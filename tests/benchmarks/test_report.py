"""The command of a report, and reports to which a later run adds."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import ROOT, command_line, report_so_far
from mars_ray.errors import ConfigError
from mars_ray.measure import deviation


@pytest.mark.parametrize(("file", "name"), [("day.py", "day"), ("drafts/peers.py", "drafts.peers")])
def test_the_command_names_the_module(file: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / file), "--policy", "fixed 1.0"])
    assert command_line() == f"python -m benchmarks.{name} --policy 'fixed 1.0'"


def test_of_an_absolute_path_the_command_has_the_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [str(tmp_path / "report.json"), "--rehearse", "l4/qwen2.5-7b", "/no/such/folder", "../shared/data"]
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "policy" / "__main__.py"), *words])
    expected = "report.json --rehearse l4/qwen2.5-7b /no/such/folder ../shared/data"
    assert command_line() == f"python -m benchmarks.policy {expected}"


def test_a_report_goes_on_with_the_same_settings(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    report = report_so_far(file, {"rows": 3})
    assert report["rows"] == 3
    file.write_text(json.dumps(report | {"rounds": [1.5]}))
    assert report_so_far(file, {"rows": 3})["rounds"] == [1.5]


def test_other_settings_and_another_machine_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    report: dict[str, Any] = report_so_far(file, {"rows": 3})
    file.write_text(json.dumps(report))
    with pytest.raises(ConfigError, match=r"rows was 3, now it is 4\. Give another --json\."):
        report_so_far(file, {"rows": 4})
    file.write_text(json.dumps(report | {"machine": report["machine"] | {"cores": 1024}}))
    with pytest.raises(ConfigError, match="cores was 1024"):
        report_so_far(file, {"rows": 3})


def test_a_single_value_has_no_deviation() -> None:
    assert (deviation([2.0]), deviation([1.0, 3.0])) == (0.0, 2**0.5)
