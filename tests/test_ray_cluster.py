"""The connection to a cluster: where a local one keeps its sockets and logs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mars_ray.ray_cluster import TEMPORARY_LENGTH, temporary_folder

OWN = f"mars-ray-{os.geteuid()}"
LONGEST = f"{'x' * TEMPORARY_LENGTH}/ray/session_2026-11-24_00-41-54_123456_4194304/sockets/plasma_store.1"


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, f"/tmp/{OWN}"),
        ({"TMPDIR": "/scratch"}, f"/scratch/{OWN}"),
        ({"TMPDIR": "/scratch", "RAY_TMPDIR": "/data"}, f"/data/{OWN}"),
        ({"TMPDIR": f"/{'long' * 9}"}, f"/tmp/{OWN}"),
    ],
)
def test_each_account_has_a_folder_of_its_own_for_ray(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: str
) -> None:
    for name in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert temporary_folder() == Path(folder)


def test_the_paths_of_ray_s_sockets_are_no_longer_than_the_system_allows() -> None:
    assert len(LONGEST) <= 107


def test_an_address_without_a_cluster_gives_one_line() -> None:
    connect = (
        "from mars_ray.program import run_program; from mars_ray.ray_cluster import connect; run_program('p', connect)"
    )
    environment = os.environ | {"RAY_ADDRESS": "nonsense"}
    said = subprocess.run([sys.executable, "-c", connect], env=environment, capture_output=True, text=True, check=False)
    assert said.returncode == 1
    assert said.stderr == "p: no Ray cluster is at RAY_ADDRESS, nonsense: Invalid address format: nonsense.\n"
